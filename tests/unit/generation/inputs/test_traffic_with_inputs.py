"""Rows of inputs stand for what they are, whatever is shared, preempted, evicted or fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler import running
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import HostArray, InputKind, ModelInput, Span
from mlx_parallm.types.request import INPUT_TOKEN, GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledBatch, ScheduledSequence, StepOutput
from tests.block_simulator import END_ID, SimulatedRunner
from tests.scheduler_harness import SchedulerHarness, Tracked

#: ``ROWS``: what the rows of a few inputs mean, as tokens.
ROWS = ((11, 12, 13, 14, 15, 16), (21, 22), (11, 12, 13), (31, 32, 33, 34, 35, 36, 37, 38, 39))


def rows_input(tokens: Sequence[int], start: int, *, cost: int, may_cut: bool) -> ModelInput:
    """Return an input whose rows mean these tokens."""
    return ModelInput(
        kind=InputKind.PROMPT_EMBEDS,
        content=repr(tokens),
        arrays={"rows": HostArray("uint8", (len(tokens),), json.dumps(list(tokens)).encode())},
        nbytes=len(tokens),
        cost=cost,
        span=Span(start, start + len(tokens)),
        may_cut=may_cut,
    )


class InputRunner(SimulatedRunner):
    """A simulated runner that keeps the products of inputs by slot."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, *, has_state: bool):
        super().__init__(num_blocks, block_size, num_slots, has_state=has_state)
        self.products: dict[int, list[int]] = {}
        self.num_computed = 0

    def run(self, batch: ScheduledBatch, failed: frozenset[int] = frozenset()) -> StepOutput:
        for slot in batch.inputs.dropped:
            del self.products[slot]
        for slot, source in batch.inputs.computed.items():
            self.products[slot] = json.loads(source.arrays["rows"].data)
            self.num_computed += 1
        rows = tuple(self._with_inputs(row) for row in batch.sequences)
        return super().run(replace(batch, sequences=rows), failed)

    def _with_inputs(self, row: ScheduledSequence) -> ScheduledSequence:
        tokens = list(row.token_ids)
        for part in row.inputs:
            product = self.products[part.slot]
            wanted = product[part.first_row : part.first_row + part.num_rows]
            assert len(wanted) == part.num_rows
            place = slice(part.offset, part.offset + part.num_rows)
            assert tokens[place] == [INPUT_TOKEN] * len(wanted)
            tokens[place] = wanted
        return replace(row, token_ids=tuple(tokens), inputs=())


class InputHarness(SchedulerHarness):
    """A harness whose requests have inputs."""

    def __init__(self, *, num_blocks: int = 40, budget: int = 16, has_state: bool = False) -> None:
        super().__init__(
            num_blocks=num_blocks,
            has_state=has_state,
            config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget),
        )
        self.inputs = InputRunner(num_blocks, self.block_size, 4, has_state=has_state)
        self._runner = self.inputs

    def add_parts(
        self,
        name: str,
        parts: Sequence[int | tuple[int, ...]],
        *,
        cost: int = 0,
        may_cut: bool = True,
        **params: int,
    ) -> None:
        """Queue a prompt of tokens and of inputs, which are tuples of what their rows mean."""
        meant, ids, inputs = list[int](), list[int](), list[ModelInput]()
        for part in parts:
            if isinstance(part, int):
                meant.append(part)
                ids.append(part)
                continue
            inputs.append(rows_input(part, len(ids), cost=cost, may_cut=may_cut))
            meant += part
            ids += [INPUT_TOKEN] * len(part)
        options: dict[str, Any] = {"max_tokens": 5, **params}
        plain = GenerateRequest(
            request_id=name,
            model="m",
            prompt_ids=tuple(meant),
            params=SamplingParams(**options),
        )
        request = replace(plain, prompt_ids=tuple(ids), inputs=tuple(inputs))
        ends = frozenset[int]() if plain.params.ignore_eos else frozenset({END_ID})
        self.scheduler.add(request, seed=3, end_ids=ends)
        outputs = {index: list[int]() for index in range(plain.params.n)}
        self.tracked[name] = Tracked(plain, 3, outputs)


PART = st.one_of(st.integers(1, 9), st.sampled_from(ROWS))
PROMPT = st.lists(PART, min_size=1, max_size=5)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(st.tuples(PROMPT, st.integers(1, 3)), min_size=1, max_size=8),
    num_blocks=st.integers(16, 40),
    cost=st.sampled_from([0, 3, 40]),
    may_cut=st.booleans(),
    has_state=st.booleans(),
    capacity=st.sampled_from([1, 10, 1000]),
    failing=st.sets(st.integers(0, 12), max_size=2),
)
def test_all_samples_are_those_of_the_same_prompt_as_tokens(
    prompts: list[tuple[list[int | tuple[int, ...]], int]],
    num_blocks: int,
    cost: int,
    may_cut: bool,
    has_state: bool,
    capacity: int,
    failing: set[int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "INPUT_CACHE_BYTES", capacity)
        harness = InputHarness(num_blocks=num_blocks, has_state=has_state)
    for number, (parts, n) in enumerate(prompts):
        harness.add_parts(f"r{number}", parts, cost=cost, may_cut=may_cut, n=n)
        harness.step(fail_rows=int(number in failing))
    harness.drain()
    assert harness.scheduler.stats().num_waiting == 0


def test_a_second_request_finds_the_prefix_and_computes_nothing() -> None:
    harness = InputHarness()
    harness.add_parts("a", [1, ROWS[3], 2, 3])
    harness.drain()
    assert harness.inputs.num_computed == 1
    harness.add_parts("b", [1, ROWS[3], 2, 3])
    harness.drain()
    assert harness.inputs.num_computed == 1
    assert harness.scheduler.stats().prefix_hits == 8


def test_preempted_rows_are_computed_again_as_they_were() -> None:
    harness = InputHarness(num_blocks=8)
    for number in range(3):
        harness.add_parts(f"r{number}", [number + 1, ROWS[3]], max_tokens=12, ignore_eos=True)
    harness.drain()
    assert harness.scheduler.stats().num_preemptions > 0


def test_costs_are_part_of_a_steps_budget() -> None:
    harness = InputHarness(budget=16)
    harness.add_parts("a", [ROWS[0]], cost=12)
    harness.add_parts("b", [ROWS[3]], cost=12)
    first, second = harness.schedule(), None
    assert first is not None
    assert [source.content for source in first.inputs.computed.values()] == [repr(ROWS[0])]
    harness.run(first)
    second = harness.schedule()
    assert second is not None
    assert [source.content for source in second.inputs.computed.values()] == [repr(ROWS[3])]
    harness.run(second)
    harness.drain()


def test_rows_that_must_not_be_cut_are_in_one_step() -> None:
    harness = InputHarness(budget=12)
    harness.add_parts("a", [1] * 10)
    harness.add_parts("b", [1, 2, 3, 4, 5, ROWS[3], 6], may_cut=False)
    harness.drain()
    parts = [part for batch in harness.batches for row in batch.sequences for part in row.inputs]
    assert [part.num_rows for part in parts] == [len(ROWS[3])]


def test_rows_that_no_step_can_hold_are_refused() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8),
        KVCacheManager(16, 4),
        max_model_len=64,
    )
    source = rows_input(ROWS[3], 0, cost=0, may_cut=False)
    request = GenerateRequest(
        request_id="a", model="m", prompt_ids=(INPUT_TOKEN,) * 9, inputs=(source,)
    )
    with pytest.raises(InvalidRequestError, match="--max-num-batched-tokens"):
        scheduler.add(request, seed=0, end_ids=frozenset())
    assert not scheduler.has_work()


def test_penalties_do_not_see_rows() -> None:
    harness = InputHarness()
    harness.add_parts("a", [7, ROWS[1], 8])
    batch = harness.schedule()
    assert batch is not None
    spec = batch.sequences[0].sample
    assert spec is not None
    assert tuple(spec.prompt_ids) == (7, 8)
