"""Runs every suite over what others wrote, and writes its part of docs/compatibility.md.

``make corpus`` runs it; ``ARGS="templates"`` runs only the suites whose name holds one of the
words, and then writes no document. ``--sample`` runs the tests with the marker ``sample`` of the
suites that need no torch; it writes no document either.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from mlx_parallm.peers import child_process
from tests.client_suites import choose, failed_of
from tests.corpus.fetch import unpacked
from tests.corpus.report import write_section
from tests.corpus.suites import LIBRARIES, ROOT, SUITES, Suite

RESULTS = ROOT / "results" / "corpus"
SAMPLE = "--sample"


def run(suite: Suite, *, is_sample: bool) -> bool:
    """Run one suite; True if nothing failed."""
    print(f"\n{suite.name}", flush=True)
    for source in suite.sources:
        unpacked(source)
    file = RESULTS / f"{suite.name}.xml"
    file.unlink(missing_ok=True)
    command = suite.command(file) + (["-m", "sample"] if is_sample else [])
    with tempfile.TemporaryDirectory() as folder:
        if suite.writer is not None and not _write(suite.writer, Path(folder)):
            return False
        variables = {**os.environ, "CORPUS_WRITTEN": folder}
        target = [child_process.COMMAND, *command]
        return child_process.run(target, cwd=ROOT, env=variables).returncode == 0


def _write(writer: str, folder: Path) -> bool:
    """Let libraries save folders; True if that worked."""
    module = f"tests.corpus.writers.{writer}"
    target = [child_process.COMMAND, str(LIBRARIES), "-m", module, str(folder)]
    return child_process.run(target, cwd=ROOT).returncode == 0


def main(words: list[str]) -> int:
    """Return the exit status."""
    is_sample = SAMPLE in words
    chosen = choose(SUITES, [word for word in words if word != SAMPLE])
    if is_sample:
        chosen = [suite for suite in chosen if suite.in_sample]
    RESULTS.mkdir(parents=True, exist_ok=True)
    passed = [run(suite, is_sample=is_sample) for suite in chosen]
    if not words:
        write_section(RESULTS, ROOT / "docs" / "compatibility.md")
    failed = failed_of(chosen, passed)
    print(f"\nFailed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
