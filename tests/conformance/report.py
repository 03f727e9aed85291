"""docs/compatibility.md from the results of a run."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.compatibility_page import with_clients
from tests.conformance.suites import HERE, ROOT, SUITES, Suite

INTRODUCTION = """\
# Compatibility

This page lists unmodified clients that were tested against a live server with the embedded model,
on the CPU.
`make conformance` installs each in its own environment, runs them, and writes this page from their
results.
The tests are in `tests/conformance/`.
"""

REMARKS = """\
The embedded model knows a few exercises and nothing else ([demo-model.md](demo-model.md)).

- If a prompt of langchain's suite is too hard for the model, that test is skipped by name.
  Another test takes the same step with a prompt that the model knows.
- langchain runs with `parallel_tool_calls: false` and `reasoning_effort: none`.
  The model makes two calls for "San Francisco, CA".
  It thinks without end about what it does not know.
  Its typed output is strict: a schema that allows more properties lets the model write one without
  end.
- schemathesis sends 200 random requests to every operation of the server's own schema.
  OpenAI's published schema is not tested, because no package used here contains it.
- The acceptance tests of Open Responses are cases of the server's own tests, over HTTP and
  WebSockets (`tests/e2e/test_open_responses.py`): 17 of 17 pass with the embedded models.
"""


@dataclass(frozen=True)
class Outcome:
    """One test: its name, its group in the file, and how it went.

    Attributes:
        group: the class; empty if there is none.
        result: passed, skipped or failed.
        reason: why it was skipped.
        properties: those that the test recorded.
    """

    name: str
    group: str
    result: str
    reason: str = ""
    properties: Mapping[str, str] = field(default_factory=dict[str, str])


def outcomes(results: Path) -> Iterator[Outcome]:
    """Return the tests in a file of JUnit's XML."""
    for case in ET.parse(results).getroot().iter("testcase"):
        # pytest writes module.Class here, Node the word "test".
        last = case.get("classname", "").rpartition(".")[2]
        group = last.removeprefix("Test") if last.startswith("Test") else ""
        name = case.get("name", "")
        recorded = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        skipped = case.find("skipped")
        if skipped is not None:
            yield Outcome(name, group, "skipped", skipped.get("message") or "", recorded)
        elif case.find("failure") is not None or case.find("error") is not None:
            yield Outcome(name, group, "failed", properties=recorded)
        else:
            yield Outcome(name, group, "passed", properties=recorded)


def write_document(results: Path, target: Path) -> None:
    """Write the clients' part of the page; a suite without results counts as failed."""
    ran = {suite: _read(suite, results) for suite in SUITES}
    parts = [INTRODUCTION, last_run(), _table(ran), REMARKS, _round_trips(ran), _skips(ran)]
    target.write_text(with_clients(target.read_text(), "\n".join(parts)))


def _read(suite: Suite, results: Path) -> list[Outcome]:
    file = results / f"{suite.name}.xml"
    return list(outcomes(file)) if file.exists() else [Outcome("no results", "", "failed")]


def last_run() -> str:
    """Return the date and the commit of the run."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    today = datetime.now(UTC)
    return f"Last run: {today.day} {today:%B %Y}, on commit {commit.strip()}.\n"


def _table(ran: dict[Suite, list[Outcome]]) -> str:
    lines = [
        "| client | version | what was run | passed | skipped | failed |",
        "|---|---|---|---|---|---|",
    ]
    for suite, tests in ran.items():
        for group in sorted({test.group for test in tests}):
            count = Counter(test.result for test in tests if test.group == group)
            what = _description(suite) + (f" ({group.lower()})" if group else "")
            lines.append(
                f"| {suite.client} | {_versions(suite)} | {what}"
                f" | {count['passed']} | {count['skipped']} | {count['failed']} |"
            )
    return "\n".join(lines) + "\n"


def _description(suite: Suite) -> str:
    """Return the first line of a file's docstring, without the client's name."""
    text = (HERE / suite.file).read_text()
    if suite.python is None:
        first = text.split("\n", 1)[0].removeprefix("// ")
    else:
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0]
    return first.replace("``", "`").rstrip(".")


def _versions(suite: Suite) -> str:
    file = ROOT / suite.pins
    if file.suffix == ".json":
        pins = json.loads(file.read_text())["dependencies"]
    else:
        pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", file.read_text(), re.MULTILINE))
    return ", ".join(f"{package} {pins[package]}" for package in suite.packages)


def _round_trips(ran: dict[Suite, list[Outcome]]) -> str:
    """Return a table of the tests named "round trip", by the text in brackets after it."""
    lines = [
        "## Tool calls: call, result, answer",
        "",
        "A test asks a question, gets the model's call, sends the result, and checks the answer.",
        "",
        "| client | by | whole | streamed |",
        "|---|---|---|---|",
    ]
    for suite, tests in ran.items():
        rows: dict[str, dict[str, str]] = {}
        for test in tests:
            match = re.search(r"round[_ ]trip.*?[\[(](.*)[\])]", test.name)
            if match:
                words = re.split(r"[-,]\s*", match[1])
                way = next(word for word in words if word in ("whole", "stream"))
                route = " ".join(w for w in words if w != way) or test.group or _route(suite)
                rows.setdefault(route.lower(), {})[way] = test.result
        for route, ways in rows.items():
            cells = f"{ways.get('whole', 'not run')} | {ways.get('stream', 'not run')}"
            lines.append(f"| {suite.client} | {route} | {cells} |")
    return "\n".join(lines) + "\n"


def _route(suite: Suite) -> str:
    routes = {"responses": "responses", "anthropic": "messages"}
    return next((route for word, route in routes.items() if word in suite.name), "chat")


def _skips(ran: dict[Suite, list[Outcome]]) -> str:
    lines = ["## Skipped", "", "| client | test | why |", "|---|---|---|"]
    for suite, tests in ran.items():
        reasons: dict[str, list[str]] = {}
        for test in tests:
            if test.result == "skipped":
                reasons.setdefault(test.reason, []).append(test.name)
        for reason, names in reasons.items():
            lines.append(f"| {suite.client} | {_listed(names)} | {reason} |")
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(set(names)))
