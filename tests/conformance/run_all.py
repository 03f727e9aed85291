"""Runs every suite against one live server, and writes docs/compatibility.md from the results.

``make conformance`` runs it when the clients are installed; ``ARGS="openai_sdk anthropic"`` runs
only the suites whose name holds one of the words, and then writes no document.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.make_seq2seq import make_seq2seq
from tests.client_suites import choose, failed_of, run_suite
from tests.conformance.report import write_document
from tests.conformance.suites import SUITES, Suite
from tests.cross_encoder_folder import write_cross_encoder
from tests.embedder_folder import write_embedder
from tests.net_folders import write_memory, write_policy
from tests.server_process import ROOT, ServerProcess

RESULTS = ROOT / "results" / "conformance"
KEY = "conformance-key"
MODEL = "mlx-parallm-demo"
RERANKER = "reranker"
EMBEDDER = "embedder"
SEEING = "demo:see"
TRANSLATOR = "translator"
POLICY = "policy"
MEMORY = "memory"
POLICIES = ("demo:cartpole", "demo:memory")
DEMO_MODEL = ROOT / "mlx_parallm" / "demo_models" / "chat"


def run(suite: Suite, url: str) -> bool:
    """Run one suite; True if nothing failed."""
    print(f"\n{suite.name}", flush=True)
    variables = {"CONFORMANCE_URL": url, "CONFORMANCE_KEY": KEY, "CONFORMANCE_MODEL": MODEL}
    return run_suite(suite, suite.folder, RESULTS, variables)


def main(words: list[str]) -> int:
    """Returns the exit status."""
    chosen = choose(SUITES, words)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # Tiny ones, beside the embedded model.
        reranker = write_cross_encoder(Path(folder) / "reranker")
        embedder = write_embedder(Path(folder) / "embedder")
        translator = make_seq2seq(Path(folder) / "translator", "tiny-t5")
        names = [f"{DEMO_MODEL}={MODEL}", f"{reranker}={RERANKER}", f"{embedder}={EMBEDDER}"]
        policy, memory = write_policy(Path(folder) / POLICY), write_memory(Path(folder) / MEMORY)
        names += [f"{translator}={TRANSLATOR}", f"{policy}={POLICY}", f"{memory}={MEMORY}"]
        others = (reranker, embedder, translator, policy, memory)
        server = ServerProcess(
            *("--api-key", KEY, "--model", str(DEMO_MODEL), SEEING, *POLICIES, *map(str, others)),
            *("--served-model-name", *names),
            is_forked=False,
        )
        try:
            server.wait_until_ready()
            passed = [run(suite, server.url) for suite in chosen]
        finally:
            server.stop()
    if not words:
        write_document(RESULTS, ROOT / "docs" / "compatibility.md")
    failed = failed_of(chosen, passed)
    print(f"\nFailed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
