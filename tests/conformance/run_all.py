"""Runs every suite against one live server, and writes docs/compatibility.md from the results.

``make conformance`` runs it when the clients are installed; ``ARGS="openai_sdk anthropic"`` runs
only the suites whose name holds one of the words, and then writes no document.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conformance.report import write_document
from tests.conformance.suites import SUITES, Suite
from tests.server_process import ROOT, ServerProcess

RESULTS = ROOT / "results" / "conformance"
KEY = "conformance-key"
MODEL = "mlx-parallm-demo"


def run(suite: Suite, url: str) -> bool:
    """Run one suite; True if nothing failed."""
    print(f"\n{suite.name}", flush=True)
    # A faster BLAS is for the server only.
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    server = {"CONFORMANCE_URL": url, "CONFORMANCE_KEY": KEY, "CONFORMANCE_MODEL": MODEL}
    results = RESULTS / f"{suite.name}.xml"
    results.unlink(missing_ok=True)
    command = suite.command(results)
    return subprocess.run(command, cwd=suite.folder, env=kept | server, check=False).returncode == 0


def main(words: list[str]) -> int:
    """Returns the exit status."""
    chosen = [suite for suite in SUITES if not words or any(w in suite.name for w in words)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    server = ServerProcess("--api-key", KEY)
    try:
        server.wait_until_ready()
        passed = [run(suite, server.url) for suite in chosen]
    finally:
        server.stop()
    if not words:
        write_document(RESULTS, ROOT / "docs" / "compatibility.md")
    failed = [suite.name for suite, well in zip(chosen, passed, strict=True) if not well]
    print(f"\nFailed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
