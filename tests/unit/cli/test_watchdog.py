"""The watchdog counts checks: no test waits for a timeout."""

from __future__ import annotations

import asyncio
import logging
import pdb
import sys
import threading

import pytest

from mlx_parallm.cli.watchdog import (
    CHECK_S,
    END_CHECKS,
    LONG_STEP_S,
    STACK_S,
    Watchdog,
    is_debugged,
)
from mlx_parallm.peers.silence import CHECKS
from mlx_parallm.types.errors import EngineDeadError


class Ends:
    """Counts how often a process would have ended."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def block_the_loop(has_begun: threading.Event, goes_on: threading.Event) -> None:
    has_begun.set()
    goes_on.wait()


async def test_a_loop_that_hangs_is_logged_with_its_stack_and_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends, has_begun, goes_on = Ends(), threading.Event(), threading.Event()
    watchdog = Watchdog(asyncio.get_running_loop(), list, ends)

    def watch() -> list[tuple[bool, int]]:
        has_begun.wait()
        seen: list[tuple[bool, int]] = []
        for _ in range(END_CHECKS + 1):
            watchdog.check()
            seen.append(("block_the_loop" in caplog.text, ends.count))
        goes_on.set()
        return seen

    watching = asyncio.ensure_future(asyncio.to_thread(watch))
    await asyncio.sleep(0)
    block_the_loop(has_begun, goes_on)
    seen = await watching
    assert [is_logged for is_logged, _ in seen].index(True) == CHECKS - 1
    assert [count for _, count in seen] == [*[0] * (END_CHECKS - 1), 1, 2]
    assert caplog.text.count("has not turned") == 1


async def test_a_loop_that_turns_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends()
    watchdog = Watchdog(asyncio.get_running_loop(), list, ends)
    for number in range(4 * END_CHECKS):
        watchdog.check()
        # It may be late, but it turns.
        if number % (CHECKS - 1) == 0:
            await asyncio.sleep(0)
    assert (caplog.text, ends.count) == ("", 0)


async def test_a_long_step_is_logged_whenever_its_time_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps_s = [0.0, 0.0]
    watchdog = Watchdog(asyncio.get_running_loop(), lambda: steps_s, Ends())
    logged: list[int] = []
    with caplog.at_level(logging.WARNING):
        for step_s in (1, 59, 60, 61, 119, 120, 200, 240, 3, 60):
            steps_s[1] = float(step_s)
            watchdog.check()
            logged.append(caplog.text.count("engine 1: the step in flight has run for"))
            await asyncio.sleep(0)
    assert logged == [0, 0, 1, 1, 1, 2, 2, 3, 3, 4]
    assert "engine 0" not in caplog.text


async def test_a_loop_in_a_debugger_is_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``breakpoint()`` waits for its user on the loop's thread."""
    ends = Ends()
    watchdog = Watchdog(asyncio.get_running_loop(), list, ends)
    replies = iter(["check"] * 2 * END_CHECKS + ["continue"])

    def next_command(_prompt: str) -> str:
        checking = threading.Thread(target=watchdog.check)
        checking.start()
        checking.join()
        return next(replies)

    debugger = pdb.Pdb(nosigint=True, readrc=False)
    debugger.use_rawinput = True
    monkeypatch.setattr("builtins.input", next_command)
    monkeypatch.setattr(debugger, "do_check", lambda _: None, raising=False)
    before = sys.gettrace()
    try:
        debugger.set_trace()
        has_gone_on = True
    finally:
        sys.settrace(before)
    assert (has_gone_on, caplog.text, ends.count, list(replies)) == (True, "", 0, [])
    # The loop has gone on, so it is watched again.
    assert not is_debugged(sys._getframe())


async def test_times_that_cannot_be_read_end_no_watch(caplog: pytest.LogCaptureFixture) -> None:
    ends, has_failed = Ends(), iter([True, True, False, True, False])

    def steps_s() -> list[float]:
        if next(has_failed):
            raise EngineDeadError("No engine is loaded.")
        return [LONG_STEP_S]

    watchdog = Watchdog(asyncio.get_running_loop(), steps_s, ends)
    reports: list[tuple[int, int]] = []
    for _ in range(5):
        watchdog.check()
        text = caplog.text
        reports.append((text.count("cannot be read"), text.count("has run for")))
        await asyncio.sleep(0)
    assert reports == [(1, 0), (1, 0), (1, 1), (2, 1), (2, 1)]


def test_the_checks_are_those_of_the_promised_times() -> None:
    assert (CHECKS * CHECK_S, END_CHECKS * CHECK_S) == (STACK_S, 120.0)
