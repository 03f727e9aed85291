"""Runs of sources among the steps: what they wait for, what they leave, and how they end."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.models.seq2seq.interface import EncoderStages
from mlx_parallm.types.model_input import source_of
from mlx_parallm.types.request import KV_CACHE, WEIGHTS
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.model_step import ModelStep
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.source_batches import (
    BLOCK_SIZE,
    Batch,
    Request,
    Running,
    alone,
    assert_same,
    new_runner,
    note,
    random_text,
    same,
    tiny_t5,
)

NUM_STAGES = 3


def request_of(seed: int, length: int = 21, num_prompt: int = 1) -> Request:
    rng = random.Random(seed)
    return Request(source_of(random_text(rng, length)), random_text(rng, num_prompt), num_tokens=4)


def finish(batch: Batch, *members: Running) -> None:
    """Decode requests whose sources are written, to their ends."""
    by_id = {each.seq_id: each for each in members}
    while rows := [batch.row(each) for each in members if each.num_left]:
        note(batch.submit(rows).wait(), by_id)


class Ends:
    """Counts how often a step in flight is waited for by the runner."""

    def __init__(self, step: Any) -> None:
        assert isinstance(step, ModelStep)
        self.count = 0
        self._end = step.end
        step.end = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        self.count += 1
        self._end()


@pytest.mark.parametrize("shared", ["source", "own", "none"])
def test_only_the_last_stage_waits_and_only_for_a_step_that_reads_its_blocks(shared: str) -> None:
    loaded = tiny_t5()
    batch = Batch(new_runner(loaded, AheadAttention(BLOCK_SIZE)))
    first, second = (batch.start(request_of(seed)) for seed in (1, 2))
    batch.submit([], stages=(batch.stages([first]),)).wait()
    taken = {"source": first.source_blocks[-1:], "own": first.blocks[:1], "none": ()}[shared]
    second.source_blocks = taken + second.source_blocks[len(taken) :]
    begun = batch.stages([second], NUM_STAGES - 1)
    in_flight = batch.submit([batch.row(first)])
    ends = Ends(in_flight)
    batch.submit([], stages=(begun,))
    assert ends.count == 0
    last = replace(begun, begun=(), places=(), num_stages=1, is_last=True)
    batch.submit([], stages=(last,))
    assert ends.count == (shared != "none")
    note(in_flight.wait(), {first.seq_id: first})
    assert same(first.answer, alone(loaded, first.request)[:1])
    finish(batch, second)
    assert_same([second.answer], [alone(loaded, second.request)])


def test_a_run_may_be_computed_beside_steps_whose_tokens_are_pending() -> None:
    loaded = tiny_t5()
    batch = Batch(new_runner(loaded, AheadAttention(BLOCK_SIZE)))
    first, second = (batch.start(request_of(seed)) for seed in (1, 2))
    batch.submit([], stages=(batch.stages([first]),))
    steps = [batch.submit([batch.row(first)])]
    steps.append(batch.submit([batch.row(first)], stages=(batch.stages([second]),)))
    steps.append(batch.submit([batch.row(first), batch.row(second)]))
    for step in steps:
        note(step.wait(), {first.seq_id: first, second.seq_id: second})
    finish(batch, first, second)
    assert_same(
        [first.answer, second.answer], [alone(loaded, each.request) for each in (first, second)]
    )


@pytest.mark.parametrize("attention", [ReferenceAttention, AheadAttention])
def test_the_next_step_fails_if_the_device_could_not_write_a_source(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(new_runner(tiny_t5(), attention(BLOCK_SIZE)))
    first = batch.start(request_of(1))
    batch.submit([], stages=(batch.stages([first]),))
    step = batch.submit([batch.row(first)])
    if attention is ReferenceAttention:
        # What is computed at once has failed before.
        assert not batch.runner.inputs.take_begun()
        return
    assert isinstance(step, ModelStep)
    begun = [id(array) for array in step._features]
    assert begun

    def wait(*arrays: list[mx.array]) -> None:
        if any(id(array) in begun for each in arrays for array in each):
            raise RuntimeError("no memory")

    monkeypatch.setattr(mx, "eval", wait)
    with pytest.raises(RuntimeError, match="no memory"):
        step.wait()


class FailingStages:
    """Stages of a model's encoder, one of which raises an error."""

    def __init__(self, model: Any, failing: int | None) -> None:
        self.generators: list[ref[Any]] = []
        self.failing = failing
        self._encode = type(model).encode
        self._model = model

    def __call__(self, sources: Sequence[Mapping[str, mx.array]]) -> EncoderStages:
        stages = self._run(sources)
        self.generators.append(ref(stages))
        return stages

    def _run(self, sources: Sequence[Mapping[str, mx.array]]) -> EncoderStages:
        inner, number = self._encode(self._model, sources), 0
        while True:
            if number == self.failing:
                raise MemoryError("no room for this stage")
            try:
                stage = next(inner)
            except StopIteration as end:
                return end.value
            yield stage
            number += 1

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(each() is not None for each in self.generators)


def with_stages(batch: Batch, failing: int | None = None) -> FailingStages:
    """Let the encoder of a batch's model fail, and keep track of its runs."""
    encoder: Any = batch.runner._sources
    stages = FailingStages(encoder._model, failing)
    encoder._model = _Encoder(encoder._model, stages)
    return stages


class _Encoder:
    def __init__(self, model: Any, encode: Any) -> None:
        self.encode = encode
        self.num_encoder_stages = model.num_encoder_stages


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
@pytest.mark.parametrize("failing", range(NUM_STAGES))
def test_a_stage_that_fails_leaves_nothing(failing: int, attention: Any) -> None:
    loaded = tiny_t5()
    batch = Batch(new_runner(loaded, attention(BLOCK_SIZE)))
    stages = with_stages(batch, failing)
    first, other = batch.start(request_of(1)), batch.start(request_of(2))
    before = pools_of(batch)
    with pytest.raises(MemoryError):
        batch.submit([], stages=(batch.stages([first]),))
    assert stages.num_alive == 0
    assert all(mx.array_equal(*pair) for pair in zip(before, pools_of(batch), strict=True))
    stages.failing = None
    for each in (other, first):
        batch.submit([], stages=(batch.stages([each]),))
    finish(batch, first, other)
    assert_same([first.answer], [alone(loaded, first.request)])
    assert_same([other.answer], [alone(loaded, other.request)])


def pools_of(batch: Batch) -> list[mx.array]:
    return [mx.array(array) for array in batch.runner._path.arrays()]


@pytest.mark.parametrize("how", ["dropped", "abandoned"])
@pytest.mark.parametrize("done", range(1, NUM_STAGES))
def test_a_run_that_is_given_up_frees_its_arrays_and_writes_nothing(done: int, how: str) -> None:
    batch = Batch(new_runner(tiny_t5(), ReferenceAttention(BLOCK_SIZE)))
    stages = with_stages(batch)
    first = batch.start(request_of(1))
    before = pools_of(batch)
    begun = batch.stages([first], done)
    batch.submit([], stages=(begun,))
    assert stages.num_alive == 1
    given_up = {"dropped": (first.seq_id,)} if how == "dropped" else {"abandoned": (begun.run,)}
    batch.submit([], **given_up)
    assert stages.num_alive == 0
    if how == "dropped":
        left = NUM_STAGES - done
        batch.submit(
            [],
            stages=(replace(begun, begun=(), places=(), num_stages=left, is_last=True),),
        )
    assert all(mx.array_equal(*pair) for pair in zip(before, pools_of(batch), strict=True))


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_a_source_that_is_dropped_is_not_written_but_the_others_of_its_run_are(
    dropped: int,
) -> None:
    loaded = tiny_t5()
    batch = Batch(new_runner(loaded, ReferenceAttention(BLOCK_SIZE)))
    members = [batch.start(request_of(seed, length)) for seed, length in enumerate((21, 5, 30))]
    begun = batch.stages(members, 1)
    batch.submit([], stages=(begun,))
    gone = members.pop(dropped)
    batch.submit([], dropped=(gone.seq_id,))
    before = kept_in(batch, gone)
    batch.submit([], stages=(replace(begun, begun=(), places=(), num_stages=2, is_last=True),))
    assert kept_in(batch, gone) == before
    finish(batch, *members)
    assert_same([each.answer for each in members], [alone(loaded, e.request) for e in members])


def kept_in(batch: Batch, running: Running) -> list[bytes]:
    """Return the bytes in the blocks of a source."""
    return [bytes(data) for data in batch.runner.read_blocks(running.source_blocks).wait()]


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_sleep_frees_runs_and_a_waking_model_encodes_anew(attention: Any) -> None:
    loaded = tiny_t5()
    batch = Batch(new_runner(loaded, attention(BLOCK_SIZE)))
    stages = with_stages(batch)
    first, second = batch.start(request_of(1)), batch.start(request_of(2))
    batch.submit([], stages=(batch.stages([first]), batch.stages([second], 1)))
    finish(batch, first)
    batch.runner.clear_inputs()
    batch.runner.live.sleep(1)
    assert stages.num_alive == 0
    batch.runner.live.wake(WEIGHTS)
    batch.runner.live.wake(KV_CACHE)
    again = [batch.start(request_of(seed)) for seed in (1, 2)]
    batch.submit([], stages=(batch.stages(again),))
    finish(batch, *again)
    assert_same([again[0].answer], [first.answer], atol=0)
    assert_same([each.answer for each in again], [alone(loaded, each.request) for each in again])


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_new_weights_encode_and_decode_from_the_next_run_on(attention: Any) -> None:
    loaded, others = tiny_t5(), tiny_t5(seed=9)
    batch = Batch(new_runner(loaded, attention(BLOCK_SIZE)))
    old = batch.start(request_of(1))
    batch.submit([], stages=(batch.stages([old]),))
    finish(batch, old)
    before = alone(loaded, old.request)
    live = batch.runner.live
    weights: Any = tree_flatten(others.model.parameters())
    live.prepare_tensors({name: to_host(array) for name, array in weights})
    live.commit()
    new = batch.start(request_of(1))
    batch.submit([], stages=(batch.stages([new]),))
    finish(batch, new)
    assert_same([old.answer], [before])
    assert_same([new.answer], [alone(others, new.request)])
    assert not same(new.answer, before)
