"""The server waits for the step in flight, but not for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from mlx_parallm.cli import serve
from mlx_parallm.cli.serve import EngineServer
from mlx_parallm.cli.watchdog import LONG_STEP_S
from mlx_parallm.server_config import ServerConfig
from tests.fake_engine import FakeEngine


class SteppingEngine(FakeEngine):
    """Has a step in flight, which ends when its time is asked for the last time."""

    def __init__(self, *times_s: float, ends: bool) -> None:
        super().__init__()
        self._times_s = list(times_s)
        self._ends = ends
        self.has_ended = threading.Event()
        self.limits_s: list[float] = []

    def stop(self) -> None:
        self.has_ended.wait()

    def stop_within(self, timeout_s: float) -> None:
        self.limits_s.append(timeout_s)

    def steps_s(self) -> Sequence[float]:
        time_s = self._times_s[0]
        if len(self._times_s) > 1:
            del self._times_s[0]
        elif self._ends:
            self.has_ended.set()
        return [time_s]


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the statuses with which the process would have ended at once."""
    statuses: list[int] = []
    monkeypatch.setattr(serve, "end_at_once", statuses.append)
    for name in ("END_TIMEOUT_S", "KILL_TIMEOUT_S", "FORCE_TIMEOUT_S", "STEP_CHECK_S"):
        monkeypatch.setattr(serve, name, 0.001)
    return statuses


async def stop(engine: SteppingEngine, *, is_forced: bool = False, status: int = 0) -> None:
    server = EngineServer(cast(Any, engine), ServerConfig(), 1, bound_to="127.0.0.1")
    if is_forced:
        server._is_forced.set()
    await server._stop_engine(status)
    # The thread of the stop is joined when the loop ends.
    engine.has_ended.set()


async def test_a_long_prefill_is_waited_for(
    statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    engine = SteppingEngine(18.0, 30.0, LONG_STEP_S - 0.1, 0.0, ends=True)
    await stop(engine)
    assert engine.limits_s == []
    assert (statuses, caplog.text) == ([], "")


async def test_a_step_that_hangs_ends_the_server(
    statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    await stop(SteppingEngine(18.0, LONG_STEP_S, ends=False))
    assert statuses == [1]
    assert "the engine hangs" in caplog.text


@pytest.mark.parametrize("status", [0, 1])
async def test_a_second_signal_waits_for_no_step(
    statuses: list[int], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    engine = SteppingEngine(18.0, ends=False)
    with caplog.at_level(logging.WARNING):
        await stop(engine, is_forced=True, status=status)
    assert engine.limits_s == [serve.FORCE_TIMEOUT_S]
    assert statuses == [status]
    assert "the step in flight did not end" in caplog.text
    assert "hangs" not in caplog.text


async def test_a_second_signal_tells_a_step_that_hangs(
    statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    await stop(SteppingEngine(LONG_STEP_S, ends=False), is_forced=True)
    assert statuses == [1]
    assert "the engine hangs" in caplog.text
