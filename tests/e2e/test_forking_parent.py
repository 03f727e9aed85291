"""A process that is forked for a test is as one that is started."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections import Counter
from typing import Any

import pytest

from mlx_parallm.peers.child_process import ChildProcess
from tests.forking_parent import ROOT, ForkedProcess, shared_parent
from tests.server_process import user_environment

FACTS = "tests.process_facts"
#: OPTIONS: of all processes here, besides the parent's environment and folder.
OPTIONS = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
#: ASKS: the descriptor by which a forked process has its own children forked.
ASKS = Counter([(stat.S_IFSOCK, False)])


@pytest.fixture(autouse=True)
def _parent() -> None:
    if shared_parent() is None:
        pytest.skip("servers are not forked here: see tests/README.md")


def run(kind: type[ChildProcess], *target: str, **options: Any) -> tuple[str, str, int]:
    """Return the output, the errors and the exit status of a process."""
    environment = user_environment() | {"MLX_PARALLM_PORT": "1"}
    options = {**OPTIONS, "stderr": subprocess.PIPE, "env": environment} | options
    with kind([*target], **options) as process:
        output, errors = process.communicate()
    return output, errors, process.returncode


def facts_of(output: str) -> list[dict[str, Any]]:
    """Return what a process and its child have printed."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def descriptors_of(facts: dict[str, Any]) -> Counter[tuple[int, bool]]:
    return Counter((kind, is_inherited) for kind, is_inherited in facts["descriptors"])


def test_a_forked_process_and_its_child_are_as_others() -> None:
    wanted, *_ = run(ChildProcess, FACTS, "0")
    actual, *_ = run(ForkedProcess, FACTS, "0")
    for new, forked in zip(facts_of(wanted), facts_of(actual), strict=True):
        assert forked["alike"] == new["alike"]
        assert descriptors_of(forked) == descriptors_of(new) + ASKS
    own, child = facts_of(actual)
    assert own["parent"] == os.getpid()
    assert child["parent"] == own["pid"]


@pytest.mark.parametrize("end", ["0", "3", "exception", "SIGTERM", "SIGKILL"])
def test_it_ends_as_others_do(end: str) -> None:
    wanted, wanted_errors, wanted_status = run(ChildProcess, FACTS, end)
    actual, errors, status = run(ForkedProcess, FACTS, end)
    assert status == wanted_status
    assert actual.count("the end") == wanted.count("the end")
    assert errors.splitlines()[-1:] == wanted_errors.splitlines()[-1:]


def test_each_has_random_numbers_of_its_own() -> None:
    numbers = [facts_of(run(ForkedProcess, FACTS, "child")[0])[0]["numbers"] for _ in range(3)]
    # Those of Python and of MLX.
    assert [len(set(each)) for each in zip(*numbers, strict=True)] == [3, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"env": user_environment() | {"HF_HUB_OFFLINE": "1"}},
        {"env": {}},
        {"cwd": ROOT / "tests", "env": user_environment() | {"PYTHONPATH": str(ROOT)}},
        {"preexec_fn": os.getpid},
    ],
    ids=["a variable of a library", "no variables", "another folder", "preexec_fn"],
)
def test_a_process_is_started_that_might_notice_the_fork(options: dict[str, Any]) -> None:
    output, _, status = run(ForkedProcess, FACTS, "child", **options)
    assert status == 0
    (facts,) = facts_of(output)
    assert ASKS - descriptors_of(facts)
