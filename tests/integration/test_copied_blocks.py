"""Blocks are copied and filled behind the step in flight, if that may still read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest

from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import (
    PENDING_TOKEN,
    Phase,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
)
from mlx_parallm.worker.attention.base import LayerPool
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from tests.compiled_attention import CompiledAttention
from tests.integration.test_parity_generate import loaded_model

BLOCK_SIZE = 8


class CopyingAttention(CompiledAttention):
    """Notes in ``order`` that it copies."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(BLOCK_SIZE)
        self._order = order

    def copy_blocks(self, pool: object, sources: mx.array, targets: mx.array) -> None:
        self._order.append("copy")

    def put_blocks(self, pool: object, blocks: mx.array, contents: mx.array) -> None:
        self._order.append("put")

    def take_blocks(self, pool: LayerPool, blocks: mx.array) -> mx.array:
        self._order.append("take")
        return super().take_blocks(pool, blocks)


class WaitTracer:
    """Notes in ``order`` that the thread waits for the step in flight while it builds another."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    @contextmanager
    def span(self, phase: Phase, batch: ScheduledBatch | None = None) -> Iterator[None]:
        if phase is Phase.WAIT:
            self._order.append("wait")
        yield


@pytest.fixture
def order() -> list[str]:
    return []


@pytest.fixture
def runner(order: list[str]) -> ModelRunner:
    loaded = loaded_model("llama")
    layouts, attention = probe_layout(loaded.model), CopyingAttention(order)
    scheduler, cache = SchedulerConfig(max_num_seqs=8), CacheConfig(block_size=BLOCK_SIZE)
    plan = plan_kv(layouts, loaded.config, cache, scheduler, 32, attention)
    runner = at_once(make_runner)(loaded, layouts, plan, 32, attention, tracer=WaitTracer(order))[0]
    order.clear()
    return runner


def row(seq_id: int, *token_ids: int, block: int, start: int = 0) -> ScheduledSequence:
    sample = SampleSpec(
        params=SamplingParams(temperature=0.0),
        seed=0,
        position=start + len(token_ids),
        prompt_ids=(),
        output_ids=(),
    )
    return ScheduledSequence(
        seq_id=seq_id,
        slot=seq_id,
        start=start,
        token_ids=token_ids,
        block_table=(block,),
        sample=sample,
    )


def submit(
    runner: ModelRunner, *sequences: ScheduledSequence, copies: tuple[tuple[int, int], ...] = ()
) -> Callable[[], object]:
    batch = ScheduledBatch(step_id=0, sequences=sequences, block_copies=copies)
    return runner.submit(batch).wait


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        # A sequence in flight had this block, and was preempted or has ended meanwhile.
        (1, {"wait", "copy"}),
        (9, {"copy"}),
    ],
)
def test_a_copy_waits_for_readers_in_flight(
    runner: ModelRunner, order: list[str], target: int, expected: set[str]
) -> None:
    assert runner.info.runs_ahead
    waits = [submit(runner, row(0, 5, 6, 7, block=0), row(1, 8, 9, block=1))]
    order.clear()
    # The first sequence goes on with its pending token; another one forks from its block.
    pending, fork = row(0, PENDING_TOKEN, block=0, start=3), row(2, 7, block=target, start=2)
    waits.append(submit(runner, pending, fork, copies=((0, target),)))
    assert set(order) == expected
    assert order[0] == ("wait" if "wait" in expected else "copy")
    for wait in waits:
        wait()


@pytest.mark.parametrize(("block", "expected"), [(1, {"wait", "put"}), (9, {"put"})])
def test_a_fill_waits_for_readers_in_flight(
    runner: ModelRunner, order: list[str], block: int, expected: set[str]
) -> None:
    (data,) = runner.read_blocks([9]).wait()
    wait = submit(runner, row(0, 5, 6, 7, block=0), row(1, 8, 9, block=1))
    order.clear()
    runner.write_blocks([20, block], [data, data])
    assert set(order) == expected
    assert order[0] == ("wait" if "wait" in expected else "put")
    wait()


def test_a_save_waits_for_nothing(runner: ModelRunner, order: list[str]) -> None:
    wait = submit(runner, row(0, 5, 6, 7, block=0))
    order.clear()
    saved = runner.read_blocks([0])
    assert set(order) == {"take"}
    for end in (wait, saved.wait):
        end()
    assert set(order) == {"take"}


def test_steps_without_pending_tokens_wait_before_they_copy(
    runner: ModelRunner, order: list[str]
) -> None:
    waits = [submit(runner, row(0, 5, 6, 7, block=0))]
    order.clear()
    waits.append(submit(runner, row(2, 7, block=9, start=2), copies=((0, 9),)))
    assert order[0] == "wait"
    for wait in waits:
        wait()


def test_nothing_is_waited_for_when_no_step_is_in_flight(
    runner: ModelRunner, order: list[str]
) -> None:
    submit(runner, row(2, 7, block=9, start=2), copies=((0, 9),))()
    assert set(order) == {"copy"}
