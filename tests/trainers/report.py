"""The trainers' part of docs/compatibility.md, from the results of a run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from tests.compatibility_page import TRAINERS, with_section
from tests.conformance.report import Outcome, last_run, outcomes
from tests.trainers.suites import HERE, ROOT, SUITES, Suite

INTRODUCTION = """\
These are reinforcement-learning trainers' own clients, unmodified, against a live server with the
embedded model on the CPU.
`make trainers` installs each in its own environment, runs the tests of `tests/trainers/` and writes
this table.

- The server runs with `--max-logprobs -1 --logprobs-mode processed_logprobs --max-loras 8
  --adapter-dir FOLDER --allowed-adapter-roots FOLDER`, as `trl vllm-serve` starts vLLM.
- The trainer's torch model is the same model.
- A stand-in of a few lines (`tests/trainers/stubs/`) makes TRL believe that `vllm` is installed.
"""


def write_section(results: Path, target: Path) -> None:
    """Replace the part behind its heading, or add it."""
    lines = [
        "| client | version | what was tested | passed | failed | what needs CUDA |",
        "|---|---|---|---|---|---|",
        *(_row(suite, results / f"{suite.name}.xml") for suite in SUITES),
    ]
    text = "\n".join([INTRODUCTION, last_run(), *lines])
    target.write_text(with_section(target.read_text(), TRAINERS, text))


def _row(suite: Suite, results: Path) -> str:
    ran = list(outcomes(results)) if results.exists() else [Outcome("no results", "", "failed")]
    count = Counter(test.result for test in ran)
    first = (ast.get_docstring(ast.parse((HERE / suite.file).read_text())) or "").split("\n", 1)[0]
    what = first.replace("``", "`").rstrip(".")
    cells = (
        suite.client,
        _versions(suite),
        what,
        str(count["passed"]),
        str(count["failed"]),
        suite.limits,
    )
    return f"| {' | '.join(cells)} |"


def _versions(suite: Suite) -> str:
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / suite.pins).read_text(), re.MULTILINE))
    return ", ".join(f"{package} {pins[package]}" for package in suite.packages) or "none: replayed"
