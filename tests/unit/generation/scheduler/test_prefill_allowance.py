"""The prefill that a step may take: far beyond measured positions, and with padding."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.generation.scheduler.step_cost import (
    CONTEXT_GROWTH,
    FIRST_CHUNK,
    MIN_CHUNK,
    PrefillAllowance,
    StepCost,
    StepWork,
)
from mlx_parallm.generation.scheduler.step_plan import StepPlan
from mlx_parallm.generation.scheduler.step_times import LEAST_BUDGET, StepTimes
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.shape_buckets import padded_tokens
from tests.simulated_gpu import h200_8b


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("start", [8_000, 32_000, 100_000])
def test_a_prompt_far_beyond_all_measured_positions_keeps_the_bound(
    start: int, *, pads: bool
) -> None:
    """Check prompts after a long cached prefix, whose attention no step has shown yet."""
    bound, rows, draw = 0.045, [(500, 1)] * 64, Random(0)

    def run(model: StepCost, work: StepWork) -> float:
        tokens = work.decode_tokens + work.prefill_tokens
        padding = padded_tokens(tokens) - tokens if pads and work.prefill_tokens else 0
        computed = replace(work, prefill_tokens=work.prefill_tokens + padding)
        taken = h200_8b(computed) * draw.uniform(0.95, 1.05)
        model.observe(work, taken)
        return taken

    for _ in range(10):
        model = StepCost(pads=pads)
        for _ in range(100):
            for _ in range(4):
                run(model, StepWork.of([*rows, (0, draw.randint(50, 600))]))
            run(model, StepWork.of(rows))
        position, times = start, list[float]()
        while position < start + 8000:
            count = PrefillAllowance(model, StepWork.of(rows), bound).room(position)
            times.append(run(model, StepWork.of([*rows, (position, count)])))
            position += count
        assert max(times) <= 1.1 * bound
        # Attention alone takes 1.2 s if it begins at position 100,000.
        assert len(times) <= 50


@settings(max_examples=40)
@given(budget=st.sampled_from([256, 512, 1024, 2048, 4096]), rows=st.integers(1, 256))
@example(budget=2048, rows=128)
def test_a_default_bound_leaves_half_to_three_quarters_of_the_budget(
    budget: int, rows: int
) -> None:
    """Check it for a device so slow that no prefill fits the bound."""
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=budget)
    times = StepTimes(config, None, pads=True, default_stall_ms=0.01)
    plan = StepPlan(budget)
    request = GenerateRequest(
        request_id="r", model="m", prompt_ids=(1,), params=SamplingParams(max_tokens=1)
    )
    group = RequestGroup(request, frozenset(), 0)
    plan.num_tokens = {Sequence(number, group, 0, 0, [1]): 1 for number in range(rows)}
    tokens = rows + times.prefill(plan).room(0)
    assert padded_tokens(tokens) == tokens
    if rows + MIN_CHUNK <= budget / 2:
        assert budget / 2 <= tokens <= LEAST_BUDGET * budget
    else:
        assert tokens <= max(LEAST_BUDGET * budget, padded_tokens(rows + MIN_CHUNK))
    if budget == 2048:
        assert tokens == 1536


@given(
    end=st.integers(MIN_CHUNK, 4000),
    starts=st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
)
def test_prompts_read_few_times_the_positions_of_recent_steps(end: int, starts: list[int]) -> None:
    model = StepCost()
    model.observe(StepWork.of([(0, end)]), 1e-9)
    allowance = PrefillAllowance(model, StepWork.of(()), 1.0)
    chunks: list[tuple[int, int]] = []
    for start in starts:
        count = allowance.room(start)
        allowance.take(start, count)
        chunks.append((start, count))
    work = StepWork.of(chunks)
    is_within = work.prefill_context <= CONTEXT_GROWTH * end * end / 2
    assert is_within or work.prefill_tokens <= FIRST_CHUNK
    assert work.prefill_tokens >= 0.75 * FIRST_CHUNK


@given(proposals=st.integers(1, 40), rows=st.integers(1, 64), most=st.integers(2600, 4000))
def test_rows_with_many_proposals_are_tokens_of_the_step(
    proposals: int, rows: int, most: int
) -> None:
    model = StepCost(pads=True)
    model.observe(StepWork.of([(0, most)]), 1e-9)
    decode = StepWork.of([(0, 1 + proposals)] * rows)
    tokens = rows * (1 + proposals) + PrefillAllowance(model, decode, 1.0).room(0)
    assert padded_tokens(tokens) == tokens


def test_what_any_prefill_costs_is_paid_once() -> None:
    model, draw = StepCost(), Random(0)

    def step_s(work: StepWork) -> float:
        return 0.004 + 4e-5 * work.prefill_tokens + (0.01 if work.prefill_tokens else 0.0)

    for _ in range(100):
        for work in (StepWork.of([(0, 1)]), StepWork.of([(0, draw.randint(200, 2000))])):
            model.observe(work, step_s(work))
    # Rows of 17 tokens count as prefill.
    for decode in (StepWork.of([(0, 17)] * 8), StepWork.of(())):
        bound = step_s(StepWork.of([(0, 520 + decode.prefill_tokens)]))
        assert PrefillAllowance(model, decode, bound).room(0) == 512
