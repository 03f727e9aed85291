"""No test has a time limit of its own: see tests/README.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: These run against a live server, by clients with limits of their own.
OTHERS = {"conformance", "trainers"}
EXEMPT = "# time limit:"
LIMITS = {"timeout", "timeout_s"}
CLOCKS = {"asyncio.wait_for", "asyncio.timeout", "time.monotonic", "time.perf_counter", "time.time"}
METHODS = {"join", "wait", "settimeout"}
MARK = "pytest.mark.timeout"
#: HINT: a part of every text with a limit; files without it need not be parsed.
HINT = re.compile(
    r"timeout|wait_for|monotonic|perf_counter|time\.time|\.(?:join|wait|settimeout)\(\s*[\d.]"
)


def time_limits(source: str) -> Iterator[int]:
    """Yield the lines, from 1, that limit a time or compare one."""
    if HINT.search(source) is None:
        return
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and is_limit(node) and EXEMPT not in lines[node.lineno - 1]:
            yield node.lineno


def is_limit(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name in CLOCKS or name == MARK:
        return True
    if any(keyword.arg in LIMITS and is_number(keyword.value) for keyword in call.keywords):
        return True
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in METHODS
    return is_method and len(call.args) == 1 and is_number(call.args[0])


def is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)


def test_limits_are_found() -> None:
    source = (
        "await asyncio.wait_for(a, 3)\nqueue.get(timeout=9)\nthread.join(30)\n"
        "time.monotonic()\n@pytest.mark.timeout(9)\ndef f(): ...\n"
    )
    assert sorted(time_limits(source)) == [1, 2, 3, 4, 5]
    source = "thread.join()\nqueue.get()\nq.get(timeout=9)  # time limit: why\nCall(timeout=None)\n"
    assert not list(time_limits(source))


def test_no_test_has_a_time_limit() -> None:
    calls = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if OTHERS.isdisjoint(path.relative_to(TESTS).parts)
        for line in time_limits(path.read_text(encoding="utf-8"))
    ]
    assert not calls, "tests wait without a limit (tests/README.md)"
