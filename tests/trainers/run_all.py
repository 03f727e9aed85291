"""Runs trainers' clients against a live server, and writes their part of docs/compatibility.md.

``make trainers`` runs it when the clients are installed; ``ARGS="trl"`` runs only the suites whose
name holds one of the words, and then writes no document.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.client_suites import choose, failed_of, run_suite
from tests.server_process import ROOT, ServerProcess
from tests.trainers.model_folder import write_model_folder
from tests.trainers.report import write_section
from tests.trainers.suites import SUITES, Suite

RESULTS = ROOT / "results" / "trainers"
MODEL = "mlx-parallm-demo"
#: The flags are those of ``trl vllm-serve``, and a folder of adapters and weights.
FLAGS = ("--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs", "--max-loras", "8")


def run(suite: Suite, variables: dict[str, str]) -> bool:
    """Run one suite; True if nothing failed."""
    print(f"\n{suite.name}", flush=True)
    path = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in suite.path)}
    return run_suite(suite, ROOT, RESULTS, variables | path)


def main(words: list[str]) -> int:
    """Return the exit status."""
    chosen = choose(SUITES, words)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        adapters, folder = Path(made) / "adapters", Path(made) / "model"
        adapters.mkdir()
        write_model_folder(folder)
        server = ServerProcess(
            *FLAGS, "--adapter-dir", str(adapters), "--allowed-adapter-roots", made, is_forked=False
        )
        facts = {"URL": server.url, "MODEL": MODEL, "FOLDER": folder, "ADAPTERS": adapters}
        try:
            server.wait_until_ready()
            variables = {f"TRAINERS_{name}": str(value) for name, value in facts.items()}
            variables["TRAINERS_SERVER_PYTHON"] = sys.executable
            passed = [run(suite, variables) for suite in chosen]
        finally:
            server.stop()
    if not words:
        write_section(RESULTS, ROOT / "docs" / "compatibility.md")
    failed = failed_of(chosen, passed)
    print(f"\nFailed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
