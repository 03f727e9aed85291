"""Prompts beside decode rows within a bound: an engine on a simulated GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from benchmarks.closed_loop import Load, run_load
from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.scheduler.step_cost import MIN_CHUNK, StepWork
from mlx_parallm.generation.scheduler.step_times import LEAST_BUDGET
from tests.simulated_gpu import GpuCosts, SimulatedGpu, VirtualClock, h200_8b, simulated_engine

COSTS = GpuCosts(device_s=h200_8b)
# SUBMITS: how the host submits a step: it waits for the device, as MLX does, or a thread does.
SUBMITS = {"waiting": COSTS, "on a thread": replace(COSTS, most_ahead=math.inf)}
BOUND_MS = 50.0


def loaded(costs: GpuCosts, bound_ms: float | None, load: Load, seed: int = 0) -> SimulatedGpu:
    """Return a device after a first load and the steps of another one."""
    gpu = SimulatedGpu(costs, VirtualClock(), seed=seed)
    config = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=2048, max_decode_stall_ms=bound_ms
    )
    engine = simulated_engine(gpu, config)
    run_load(engine, load, vocab_size=250, seed=seed, clock=gpu.clock)
    for record in (gpu.steps, gpu.padding, gpu.cuts):
        record.clear()
    times = run_load(engine, load, vocab_size=250, seed=seed + 1, clock=gpu.clock)
    assert len(times.first) == load.requests, "a request has no token"
    assert times.tokens == load.requests * load.output
    return gpu


def mixed(gpu: SimulatedGpu) -> list[tuple[StepWork, float]]:
    """Return the steps with prompts beside decode rows."""
    return [step for step in gpu.steps if is_mixed(step)]


def is_mixed(step: tuple[StepWork, float]) -> bool:
    work, _ = step
    return work.prefill_tokens > 0 and work.decode_tokens > 0


@pytest.mark.parametrize("submits", SUBMITS)
@pytest.mark.parametrize("clients", [48, 128])
def test_steps_with_prompts_take_what_the_bound_allows(submits: str, clients: int) -> None:
    gpu = loaded(SUBMITS[submits], BOUND_MS, Load(clients, 350, 40, 3 * clients, spread=0.5))
    steps = mixed(gpu)
    times_ms = sorted(1e3 * taken for _, taken in steps)
    assert times_ms[-1] <= 1.15 * BOUND_MS
    # Only the last ones of a burst have fewer prompts than fit.
    assert times_ms[len(times_ms) // 2] >= 0.65 * BOUND_MS
    # With prompts left over, only fewer tokens than the smallest chunk are padded.
    records = zip(gpu.steps, gpu.padding, gpu.cuts, strict=True)
    cut = [padding for step, padding, is_cut in records if is_cut and is_mixed(step)]
    assert len(cut) > len(steps) // 2
    assert max(cut) < MIN_CHUNK


def num_tokens(step: tuple[StepWork, float]) -> int:
    return step[0].decode_tokens + step[0].prefill_tokens


@pytest.mark.parametrize("submits", SUBMITS)
def test_a_bound_leaves_the_device_no_more_idle(submits: str) -> None:
    costs, load = SUBMITS[submits], Load(96, 350, 60, 288)
    shares = {}
    for bound_ms in (None, BOUND_MS):
        gpu = SimulatedGpu(costs, VirtualClock())
        config = SchedulerConfig(
            max_num_seqs=256, max_num_batched_tokens=2048, max_decode_stall_ms=bound_ms
        )
        engine = simulated_engine(gpu, config)
        times = run_load(engine, load, vocab_size=250, clock=gpu.clock)
        shares[bound_ms] = sum(taken for _, taken in gpu.steps) / times.seconds
    assert shares[BOUND_MS] >= shares[None] - 0.02


@pytest.mark.parametrize("times_as_slow", [1, 30])
@pytest.mark.parametrize("pads", [False, True])
def test_a_default_bound_leaves_prompts_most_of_the_budget(
    times_as_slow: int, *, pads: bool
) -> None:
    costs = replace(COSTS, device_s=lambda work: times_as_slow * h200_8b(work), pads=pads)
    gpu = SimulatedGpu(costs, VirtualClock())
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=1024)
    engine = simulated_engine(gpu, config, default_stall_ms=20.0)
    # No prompt ends before the last step with prompts.
    run_load(engine, Load(24, 4000, 400, 24), vocab_size=250, clock=gpu.clock)
    full = [step for step in mixed(gpu) if step[0].decode_tokens < 23]
    assert full
    least = LEAST_BUDGET * config.max_num_batched_tokens  # type: ignore[operator]
    assert min(map(num_tokens, full)) >= 0.8 * least
    if times_as_slow > 1:
        assert max(map(num_tokens, full)) <= least


def test_a_bound_of_zero_is_none() -> None:
    gpu = SimulatedGpu(COSTS, VirtualClock())
    config = SchedulerConfig(max_num_batched_tokens=1024, max_decode_stall_ms=0)
    engine = simulated_engine(gpu, config, default_stall_ms=0.001)
    run_load(engine, Load(8, 2000, 100, 8), vocab_size=250, clock=gpu.clock)
    assert any(num_tokens(step) == 1024 for step in mixed(gpu))


@given(
    clients=st.integers(1, 40),
    prompt=st.integers(1, 900),
    output=st.integers(1, 20),
    bound_ms=st.sampled_from([0.01, 8.0, 20.0, 60.0]),
    most_ahead=st.sampled_from([363, math.inf]),
    pads=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15)
def test_under_any_bound_all_requests_end_and_no_decode_row_waits(
    clients: int,
    prompt: int,
    output: int,
    bound_ms: float,
    most_ahead: float,
    pads: bool,
    seed: int,
) -> None:
    costs = replace(COSTS, most_ahead=most_ahead, pads=pads, noise=0.2)
    load = Load(clients, prompt, output, 2 * clients, spread=0.9)
    gpu = loaded(costs, bound_ms, load, seed)
    # A row of every sequence that decodes is in every step: its answer takes as many steps.
    prefilling = sum(1 for work, _ in gpu.steps if work.prefill_tokens)
    assert len(gpu.steps) <= 2 * load.requests * load.output + prefilling + 2
