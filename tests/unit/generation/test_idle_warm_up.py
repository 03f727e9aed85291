"""Shapes are prepared while nothing else is to be done: requests come first."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.engine.commands import Command, Stop, Submit
from mlx_parallm.engine.live_weights import KV_CACHE
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledBatch
from mlx_parallm.worker.generation.warm_up import WarmUp
from mlx_parallm.worker.worker import Worker
from tests.fakes import ByteTokenizer, FakeRunner, make_info

NUM_SHAPES = 6
NUM_TOKENS = 3


class Shapes:
    """Steps of a warm-up, which are noted beside those of requests."""

    def __init__(self, notes: list[str], *, fails_at: int | None = None) -> None:
        self.blocks: list[int] = []
        self._notes = notes
        self._fails_at = fails_at

    @property
    def is_done(self) -> bool:
        return len(self.blocks) == NUM_SHAPES

    def run_next(self, block: int) -> None:
        self._notes.append("shape")
        if len(self.blocks) == self._fails_at:
            raise RuntimeError("out of memory")
        self.blocks.append(block)


class Inbox:
    """Gives a request after so many looks at an empty inbox, and ``Stop`` to who would wait."""

    def __init__(self, request: Command, after: int) -> None:
        self._requests = [request]
        self._after = after

    def get(self, *, block: bool, timeout: float | None) -> Command:
        is_due = self._after == 0 or (block and timeout is None)
        if self._requests and is_due:
            return self._requests.pop()
        if block and timeout is None:
            return Stop()
        self._after = max(0, self._after - 1)
        raise queue.Empty


class Trial:
    """A loop over one engine with a warm-up."""

    def __init__(self, *, fails_at: int | None = None, num_blocks: int = 8) -> None:
        self.notes: list[str] = []
        self.shapes = Shapes(self.notes, fails_at=fails_at)
        info = make_info(num_blocks=num_blocks)
        self.kv = KVCacheManager(info.num_blocks, info.block_size)
        runner = FakeRunner(lambda row: 65, info=info, before=self._note)
        self.engine = GenerationEngine(
            Scheduler(SchedulerConfig(), self.kv, max_model_len=info.max_model_len),
            runner,
            ByteTokenizer(),
            EngineMetrics(MetricFamilies(), "m", info),
            warm_up=cast("WarmUp", self.shapes),
        )
        self.refusals: list[object] = []

    def _note(self, batch: ScheduledBatch) -> None:
        assert batch.sequences
        self.notes.append("step")

    def run(self, *, after: int = 0) -> None:
        request = GenerateRequest(
            request_id="a",
            model="m",
            prompt_ids=(1, 2, 3),
            params=SamplingParams(max_tokens=NUM_TOKENS),
        )
        submit = Submit(request=request, reply=self.refusals.append, arrival_s=0.0)
        EngineLoop(
            {"m": self.engine},
            cast("Any", Inbox(submit, after)),
            lambda events: None,
            families=MetricFamilies(),
            worker=Worker(),
        ).run()


def test_a_request_that_is_there_comes_before_all_shapes() -> None:
    trial = Trial()
    trial.run()
    assert trial.refusals == [None]
    assert trial.notes == ["step"] * NUM_TOKENS + ["shape"] * NUM_SHAPES


def test_a_request_waits_for_one_shape_at_most_and_the_others_follow_it() -> None:
    trial = Trial()
    trial.run(after=3)
    before = trial.notes.index("step")
    assert 0 < before <= 3
    rest = ["shape"] * (NUM_SHAPES - before)
    assert trial.notes[before:] == ["step"] * NUM_TOKENS + rest


def test_an_error_ends_the_warm_up_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    trial = Trial(fails_at=2)
    trial.run(after=NUM_SHAPES * 2)
    assert trial.notes == ["shape"] * 3 + ["step"] * NUM_TOKENS
    assert "the warm-up ended" in caplog.text
    assert "out of memory" in caplog.text
    assert trial.kv.num_free == trial.kv.num_blocks


def test_shapes_take_no_block_that_holds_what_may_be_found_again() -> None:
    """At most one cached block is lost, and only where none is free."""
    trial = Trial()
    table = trial.kv.new_table((), b"", use_cache=True)
    tokens = list(range(28))
    assert trial.kv.grow(table, 28)
    trial.kv.commit(table, tokens, 28)
    held = set(table.blocks)
    trial.kv.free(table)
    while trial.engine.prepare():
        pass
    assert held.isdisjoint(trial.shapes.blocks)
    assert len(trial.shapes.blocks) == NUM_SHAPES
    again = trial.kv.new_table([*tokens, 0], b"", use_cache=True)
    assert set(again.blocks) == held


def test_nothing_is_prepared_without_a_block_or_while_the_engine_is_paused() -> None:
    trial = Trial(num_blocks=2)
    table = trial.kv.new_table((), b"", use_cache=False)
    assert trial.kv.grow(table, 8)
    assert not trial.engine.prepare()
    trial.kv.free(table)
    trial.engine.is_paused = True
    assert not trial.engine.prepare()
    trial.engine.is_paused = False
    assert trial.engine.prepare()
    assert trial.notes == ["shape"]


def test_nothing_is_prepared_while_kv_is_put_away() -> None:
    trial = Trial()
    live = SimpleNamespace(asleep={KV_CACHE})
    trial.engine.live = cast("Any", live)
    assert not trial.engine.prepare()
    live.asleep.clear()
    assert trial.engine.prepare()
