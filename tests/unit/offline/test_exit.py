"""Engines that nobody closes end with their object and with their program."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from mlx_parallm.engine.kind import BuiltModel
from mlx_parallm.offline.engine import OfflineEngine
from mlx_parallm.offline.generation import run
from tests.fakes import FakeRunner, spell
from tests.scripted_engine import engine_of
from tests.scripted_process import builder
from tests.unit.offline.gated_engine import HELLO, on_a_thread, requests, said

pytestmark = pytest.mark.usefixtures("short_searches_for_garbage")


class Held:
    """The end of an engine, which needs a lock.

    Attributes:
        has_ended: set once it has ended.
    """

    def __init__(self, engine: OfflineEngine) -> None:
        self.lock = threading.Lock()
        self.has_ended = threading.Event()
        self._stop = engine.client.stop
        engine.client.stop = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        with self.lock:
            self._stop()
        self.has_ended.set()


def collected() -> Held:
    """Return the end of an engine that garbage collection will find."""
    engine = OfflineEngine(engine_of(builder(FakeRunner(spell(HELLO)))))
    cycle: list[Any] = [engine]
    cycle.append(cycle)
    return Held(engine)


def test_a_collection_takes_no_lock_that_the_end_needs() -> None:
    end = collected()
    with end.lock:
        gc.collect()
        assert not end.has_ended.is_set()
    end.has_ended.wait()


def test_an_engine_begins_to_load_when_those_have_ended_that_were_collected() -> None:
    end = collected()
    with end.lock:
        gc.collect()
        seen: list[bool] = []
        build = builder(FakeRunner(spell(HELLO)))

        def noting(*details: Any) -> list[BuiltModel]:
            seen.append(end.has_ended.is_set())
            return list(build(*details))

        thread, _ = on_a_thread(lambda: OfflineEngine(engine_of(noting)).close())
    thread.join()
    assert seen == [True]


# EXIT: a program whose engine has not ended when it exits.
EXIT = """
import gc, sys
from mlx_parallm.offline.engine import OfflineEngine
from tests.fakes import FakeRunner, spell
from tests.scripted_engine import engine_of
from tests.scripted_process import builder

engine = OfflineEngine(engine_of(builder(FakeRunner(spell("hello")))))
stop = engine.client.stop

def noted_stop():
    stop()
    print("ended", flush=True)

engine.client.stop = noted_stop
how = sys.argv[1]
if how == "collected":
    cycle = [engine]
    cycle.append(cycle)
    del engine, cycle
    gc.collect()
elif how == "interrupted":
    def interrupted():
        raise KeyboardInterrupt
    engine._thread.end = interrupted
    engine.close()
print("exits", flush=True)
"""


@pytest.mark.parametrize("how", ["left", "collected", "interrupted"])
def test_a_program_exits_once_its_engine_has_ended(how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXIT, how], capture_output=True, text=True, check=False
    )
    assert ended.stdout.count("ended") == 1, ended
    assert ended.returncode == (-signal.SIGINT if how == "interrupted" else 0), ended
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("is_main", [True, False])
def test_threads_end_with_the_object(is_main: bool) -> None:
    before = set(threading.enumerate())

    def use() -> None:
        engine = OfflineEngine(engine_of(builder(FakeRunner(spell(HELLO)))))
        cycle: list[Any] = [engine]
        cycle.append(cycle)
        assert said(run(requests("a"), engine, None)) == [HELLO]
        del engine, cycle
        gc.collect()

    if is_main:
        use()
    else:
        thread, results = on_a_thread(use)
        thread.join()
        assert results == [None]
    for thread in set(threading.enumerate()) - before:
        thread.join()
