"""Steps kept under a time: the cost model by itself, and a scheduler on simulated devices."""

from __future__ import annotations

import statistics
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.assembly import CUDA_TOKEN_BUDGET, with_token_budget
from mlx_parallm.generation.scheduler.step_cost import (
    FIRST_CHUNK,
    GROWTH,
    MIN_CHUNK,
    NEAR_GROWTH,
    PrefillAllowance,
    StepCost,
    StepWork,
)
from mlx_parallm.numerics.fits import INERTIA, OnlineFit, PrefillFit
from mlx_parallm.types.shape_buckets import padded_tokens, unpadded_tokens
from tests.step_simulator import Cost, SimulatedDevice

WARM_UP = 12
# From the smallest chunk to the token budget there are 28.
MOST_SIZES = 18
# A prompt of 16,000 tokens would have 28 chunks, if it were known what they cost.
MOST_MIXED_STEPS = 80


def linear(fixed: float, row: float, context: float, token: float, attention: float) -> Cost:
    def cost(decode: int, read: float, prefill: int, attended: float) -> float:
        return fixed + row * decode + context * read + token * prefill + attention * attended

    return cost


def host_bound(decode: int, read: float, prefill: int, attended: float) -> float:
    """Below some 200 tokens the host is what takes time."""
    device = 0.002 + 4e-5 * (prefill + decode) + 2e-7 * read + 1.5e-9 * attended
    return max(0.0092, device)


def with_setup(decode: int, read: float, prefill: int, attended: float) -> float:
    """Any prefill at all costs something."""
    setup = 0.006 if prefill else 0.0
    return 0.005 + 1e-4 * decode + 2e-7 * read + setup + 3e-5 * prefill + 1.5e-9 * attended


def slow_host(decode: int, read: float, prefill: int, attended: float) -> float:
    """Return a step's seconds if the host prepares any prefill as long as 600 tokens take."""
    host = 0.0125 if prefill else 0.005
    device = 0.003 + 2e-5 * decode + 1e-8 * read + 1.5e-5 * prefill + 4e-10 * attended
    return max(host, device)


DEVICES: dict[str, tuple[Cost, float]] = {
    "gpu": (linear(0.004, 1e-4, 2e-7, 4e-5, 1.5e-9), 27),
    "laptop": (linear(0.02, 1e-3, 1e-6, 1.5e-3, 5e-8), 300),
    "slow attention": (linear(0.004, 1e-4, 2e-7, 2e-5, 2e-8), 27),
    "host-bound": (host_bound, 27),
    "setup": (with_setup, 30),
}


def taught(cost: Cost, seed: int = 0, samples: int = 100) -> StepCost:
    draw, model = Random(seed), StepCost()
    for _ in range(samples):
        rows = [(draw.randrange(2000), 1) for _ in range(draw.randint(1, 64))]
        if draw.random() < 0.5:
            rows.append((draw.randrange(8000), draw.randint(MIN_CHUNK, 512)))
        work = StepWork.of(rows)
        model.observe(work, seconds(cost, work))
    return model


def seconds(cost: Cost, work: StepWork) -> float:
    return cost(work.decode_tokens, work.decode_context, work.prefill_tokens, work.prefill_context)


def test_short_rows_count_as_decode_rows() -> None:
    work = StepWork.of([(10, 1), (0, MIN_CHUNK - 1), (100, MIN_CHUNK)])
    assert (work.decode_tokens, work.prefill_tokens) == (MIN_CHUNK, MIN_CHUNK)
    assert work.prefill_context == MIN_CHUNK * (100 + MIN_CHUNK / 2)


@given(
    fixed=st.floats(1e-3, 2e-2),
    row=st.floats(1e-5, 1e-3),
    context=st.floats(1e-8, 1e-6),
    token=st.floats(1e-5, 2e-3),
    attention=st.floats(0, 5e-8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_a_linear_cost_is_learned(
    fixed: float, row: float, context: float, token: float, attention: float, seed: int
) -> None:
    cost = linear(fixed, row, context, token, attention)
    model = taught(cost, seed)
    decode = StepWork.of([(1000, 1)] * 32)
    mixed = StepWork.of([*[(1000, 1)] * 32, (4000, 256)])
    assert model.predict(decode) == pytest.approx(seconds(cost, decode), rel=0.15)
    assert model.predict(mixed) == pytest.approx(seconds(cost, mixed), rel=0.15)


@given(
    samples=st.lists(
        st.tuples(st.integers(MIN_CHUNK, 2000), st.integers(0, 9000), st.floats(1e-4, 0.1)),
        min_size=1,
        max_size=12,
    )
)
def test_no_other_coefficients_of_prefill_fit_better(
    samples: list[tuple[int, int, float]],
) -> None:
    decode = OnlineFit(3)
    decode.learn((4, 400, 1), 1e-3)
    fit = PrefillFit(decode)
    before = list(fit.coefficients)
    for count, start, taken in samples:
        latest = list(fit.coefficients)
        features = (1.0, count, count * (start + count / 2))
        fit.learn(features, (count % 7, count, 1.0), count.bit_length(), taken)
        # An outlier may be left out.
        before = before if fit.coefficients == latest else latest
    assert min(fit.coefficients) >= 0
    least = loss(fit, fit.coefficients, before)
    for index, value in enumerate(fit.coefficients):
        for other in (0.0, 0.9 * value, 1.1 * value, value + 1e-7):
            changed = list(fit.coefficients)
            changed[index] = other
            assert loss(fit, changed, before) >= least - 1e-9 * abs(least)


def loss(fit: PrefillFit, coefficients: list[float], before: list[float]) -> float:
    """Return the loss that is minimised, without terms that do not depend on the coefficients."""
    total = 0.0
    kept, known = fit._by_magnitude.values(), fit._decode.coefficients
    for i, coefficient in enumerate(coefficients):
        own = sum(moments.squares[i][i] for moments in kept)
        total += INERTIA * own * (coefficient - before[i]) ** 2
        for moments in kept:
            decode = sum(a * b for a, b in zip(known, moments.others[i], strict=True))
            total -= 2 * coefficient * (moments.products[i] - decode)
        for j, other in enumerate(coefficients):
            total += coefficient * other * sum(moments.squares[i][j] for moments in kept)
    return total


def test_one_interrupted_step_changes_little_and_a_slower_device_is_noticed() -> None:
    cost = linear(0.005, 1e-4, 0, 4e-5, 0)
    model = taught(cost)
    work = StepWork.of([*[(1000, 1)] * 32, (4000, 256)])
    before = model.predict(work)
    model.observe(work, 100 * before)
    assert model.predict(work) < 1.5 * before
    for _ in range(20):
        model.observe(work, 2 * before)
    assert model.predict(work) == pytest.approx(2 * before, rel=0.1)


@given(
    start=st.integers(0, 20_000),
    milliseconds=st.floats(0.01, 100),
    attention=st.floats(0, 5e-8),
)
def test_the_largest_chunk_within_a_time_is_found(
    start: int, milliseconds: float, attention: float
) -> None:
    model = taught(linear(0.004, 1e-4, 2e-7, 4e-5, attention))
    limit = milliseconds / 1e3
    most = model.most_prefill(limit)
    count = model.chunk_within(start, limit, most)
    assert count <= most

    def chunk_seconds(tokens: int) -> float:
        _, per_token, per_position = model._prefill.coefficients
        return tokens * per_token + tokens * (start + tokens / 2) * per_position

    assert chunk_seconds(count) <= limit * (1 + 1e-9)
    assert count == most or chunk_seconds(count + 1) > limit * (1 - 1e-9)


def test_what_was_never_seen_is_begun_small_and_grows_by_steps() -> None:
    model, decode = StepCost(), StepWork.of(())
    assert PrefillAllowance(model, decode, 1.0).room(0) == FIRST_CHUNK
    model.observe(StepWork.of([(0, 128)]), 1e-6)
    assert PrefillAllowance(model, decode, 1.0).room(0) == GROWTH * 128
    # What is not seen any more is not trusted for ever.
    for _ in range(20):
        model.observe(StepWork.of([(0, MIN_CHUNK)]), 1e-6)
    assert PrefillAllowance(model, decode, 1.0).room(0) == FIRST_CHUNK


def test_what_decode_rows_take_is_not_counted_twice_if_it_is_learned_later() -> None:
    model, decode = StepCost(), StepWork.of([(500, 1)] * 32)
    mixed = StepWork.of([*[(500, 1)] * 32, (0, 256)])
    for _ in range(5):
        model.observe(mixed, 0.012)
    assert model.predict(mixed) == pytest.approx(0.012, rel=0.05)
    for _ in range(5):
        model.observe(decode, 0.005)
    assert model.predict(mixed) == pytest.approx(0.012, rel=0.05)


@given(taken=st.floats(1e-3, 0.03), most=st.integers(FIRST_CHUNK, 1000))
def test_growth_stays_within_the_bound_where_a_device_takes_longer_at_last(
    taken: float, most: int
) -> None:
    """Check the bound for tokens that cost equally: x times the tokens take x times as long."""
    model, bound = StepCost(), 0.015
    model.observe(StepWork.of([(0, most)]), taken)
    growth = model.most_prefill(bound) / most
    if taken > bound:
        assert growth == 1
    else:
        assert growth <= GROWTH
        assert growth <= max(NEAR_GROWTH, bound / taken)
        assert growth >= 0.98 * NEAR_GROWTH


@given(taken=st.floats(1e-3, 0.1), most=st.integers(200, 2000), least=st.integers(1, 600))
def test_beyond_the_least_tokens_steps_grow_in_proportion_to_their_time(
    taken: float, most: int, least: int
) -> None:
    """Check it for samples of one size, from which no fixed cost can be learned."""
    model, bound = StepCost(), 0.045
    for _ in range(20):
        model.observe(StepWork.of([(0, most)]), taken)
    allowance = PrefillAllowance(model, StepWork.of(()), bound, least)
    allowed = max(least, FIRST_CHUNK, GROWTH * most if taken < 1e-2 else most * bound / taken)
    assert allowance.room(0) <= 1.01 * allowed
    assert allowance.room(0) >= 0.8 * least
    allowance.take(0, least)
    assert allowance.room(0) <= 1.01 * allowed - least + MIN_CHUNK


@given(st.integers(MIN_CHUNK, 4000), st.integers(0, 40))
def test_all_prefill_of_a_step_is_one_of_few_numbers(most: int, first: int) -> None:
    model = StepCost()
    model.observe(StepWork.of([(0, most)]), 1e-9)
    allowance = PrefillAllowance(model, StepWork.of(()), 1.0)
    taken = min(first, allowance.room(0))
    allowance.take(0, taken)
    total = taken + allowance.room(0)
    assert total & (total - 1) == 0 or total % (1 << total.bit_length() - 3) == 0
    allowed = max(FIRST_CHUNK, int(GROWTH * most))
    assert 0.8 * allowed - MIN_CHUNK <= total <= allowed


@given(st.integers(MIN_CHUNK, 4000), st.integers(0, 40), st.integers(0, 300))
def test_a_step_that_would_be_padded_has_tokens_instead(most: int, first: int, rows: int) -> None:
    model = StepCost(pads=True)
    model.observe(StepWork.of([(0, most)]), 1e-9)
    allowance = PrefillAllowance(model, StepWork.of([(9, 1)] * rows), 1.0)
    allowed = max(FIRST_CHUNK, int(GROWTH * padded_tokens(most)))
    # The first prompt may go on, whatever is allowed.
    full = max(unpadded_tokens(rows + allowed), padded_tokens(rows + MIN_CHUNK))
    taken = min(first, allowance.room(0))
    allowance.take(0, taken)
    total = rows + taken + allowance.room(0)
    # Fewer than the smallest chunk are not worth a row.
    assert full - MIN_CHUNK < total <= full
    assert taken > 1 or total == full


def test_tokens_and_the_padding_of_a_step_are_learned_as_tokens() -> None:
    model, draw = StepCost(pads=True), Random(0)
    for _ in range(100):
        rows, chunk = draw.randint(0, 200), draw.randint(100, 1500)
        padding = padded_tokens(rows + chunk) - rows - chunk
        decode = StepWork.of([(0, 1)] * rows)
        model.observe(decode, 0.004)
        model.observe(StepWork.of([(0, 1)] * rows + [(0, chunk)]), 0.004 + 2e-5 * (chunk + padding))
    for rows, tokens in ((56, 200), (12, 500), (112, 1424)):
        decode = StepWork.of([(0, 1)] * rows)
        bound = 0.004 + 2e-5 * tokens * 1.02
        assert PrefillAllowance(model, decode, bound).room(0) == tokens


def test_steps_whose_end_is_not_known_are_learned_with_their_neighbours() -> None:
    """Check it for a host that sees half of each step's time as that of the next one."""
    cost = linear(0.005, 1e-4, 0, 4e-5, 0)
    model, draw, before = StepCost(), Random(0), 0.0
    decode = StepWork.of([(500, 1)] * 32)
    for number in range(300):
        work = decode
        if number % 5 == 4:
            work = StepWork.of([*[(500, 1)] * 32, (0, draw.randint(300, 900))])
        taken = seconds(cost, work)
        model.observe(work, before + taken / 2, is_end_known=False)
        before = taken / 2
    assert model.predict(decode) == pytest.approx(seconds(cost, decode), rel=0.02)
    for chunk in (300, 900):
        mixed = StepWork.of([*[(500, 1)] * 32, (0, chunk)])
        assert model.predict(mixed) == pytest.approx(seconds(cost, mixed), rel=0.05)


def test_an_allowance_is_used_up_but_for_one_smallest_chunk() -> None:
    model = taught(linear(0.004, 1e-4, 0, 1e-4, 0))
    decode = StepWork.of([(10, 1)] * 4)
    allowance = PrefillAllowance(model, decode, model.predict(decode) + 0.01)
    room = allowance.room(0)
    assert room == pytest.approx(100, rel=0.05)
    allowance.take(0, room - 40)
    assert allowance.room(0) == pytest.approx(40, abs=1)
    allowance.take(0, 30)
    assert allowance.room(0) == 0, "a sliver is not worth a row"
    late = PrefillAllowance(model, decode, 0.0)
    assert late.room(0) == MIN_CHUNK
    late.take(0, MIN_CHUNK)
    assert late.room(0) == 0


@pytest.mark.parametrize(
    ("compile_s", "runs_ahead"),
    [
        pytest.param(0.0, False, id="compiled-in turn", marks=pytest.mark.slow),
        pytest.param(0.0, True, id="compiled-ahead"),
        pytest.param(2.0, False, id="compiling-in turn"),
        pytest.param(2.0, True, id="compiling-ahead", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", DEVICES)
def test_a_long_prompt_under_32_streams_keeps_steps_within_the_bound(
    name: str, compile_s: float, runs_ahead: bool
) -> None:
    cost, bound_ms = DEVICES[name]
    config = SchedulerConfig(max_num_batched_tokens=2048, max_decode_stall_ms=bound_ms)
    device = SimulatedDevice(cost, config, compile_s=compile_s, runs_ahead=runs_ahead)
    for stream in range(32):
        device.add(str(stream), 64, 2000)
    for _ in range(40):
        device.step()
    begin = len(device.steps)
    device.add("long", 16_000, 8)
    while sum(step.prefill for step in device.steps[begin:]) < 15_900:
        assert device.step() is not None
    mixed = device.steps[begin:]
    assert all(step.decode >= 32 for step in mixed), "a stream missed a step"
    warm = [
        step.seconds * 1e3 for step in mixed[WARM_UP:] if step.seconds < compile_s or not compile_s
    ]
    # The noise and the error of the model: by the second magnitude they are small.
    assert max(warm) <= 1.1 * bound_ms
    assert statistics.median(warm) >= 0.7 * bound_ms, "the time that is allowed is not used"
    assert len({step.prefill for step in mixed}) <= MOST_SIZES


def test_a_size_that_is_compiled_late_does_not_hide_what_attention_costs() -> None:
    config = SchedulerConfig(max_num_batched_tokens=2048, max_decode_stall_ms=27)
    for seed in range(4):
        cost, _ = DEVICES["slow attention"]
        device = SimulatedDevice(cost, config, compile_s=2.0, seed=seed)
        for stream in range(32):
            device.add(str(stream), 64, 2000)
        for _ in range(40):
            device.step()
        begin = len(device.steps)
        device.add("long", 16_000, 8)
        while sum(step.prefill for step in device.steps[begin:]) < 15_900:
            device.step()
        warm = [step.seconds for step in device.steps[begin + WARM_UP :] if step.seconds < 2]
        assert max(warm) <= 1.1 * 0.027


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("bound_ms", [12, 14, 15])
def test_a_prompt_gets_the_tokens_that_cost_nothing_more(bound_ms: float, runs_ahead: bool) -> None:
    """Check bounds above and below the fixed time that any prefill takes."""
    config = SchedulerConfig(max_num_batched_tokens=4096, max_decode_stall_ms=bound_ms)
    device = SimulatedDevice(slow_host, config, runs_ahead=runs_ahead)
    for stream in range(32):
        device.add(str(stream), 64, 2000)
    for _ in range(40):
        device.step()
    for name in ("first", "second"):
        begin = len(device.steps)
        device.add(name, 16_000, 2)
        while device.scheduler.has_request(name):
            assert device.step() is not None
        mixed = [step for step in device.steps[begin:] if step.prefill]
        # In chunks of 16 tokens there would be a thousand.
        assert len(mixed) <= MOST_MIXED_STEPS
        longest = sorted(step.seconds for step in mixed)
        assert longest[len(mixed) // 2] <= 1.1 * max(0.0125, bound_ms / 1e3)
        assert longest[-1] <= NEAR_GROWTH * 1.1 * max(0.0125, bound_ms / 1e3)


def test_without_decode_rows_the_whole_budget_is_used() -> None:
    config = SchedulerConfig(max_num_batched_tokens=512, max_decode_stall_ms=1)
    device = SimulatedDevice(linear(0.004, 1e-4, 0, 1e-3, 0), config)
    device.add("alone", 4096, 4)
    assert [device.step().prefill for _ in range(8)] == [512] * 8  # type: ignore[union-attr]


def test_a_bound_below_the_decode_step_still_lets_prompts_through() -> None:
    config = SchedulerConfig(max_decode_stall_ms=1)
    device = SimulatedDevice(linear(0.02, 1e-4, 0, 1e-4, 0), config)
    device.add("stream", 16, 1000)
    for _ in range(5):
        device.step()
    device.add("late", 200, 1)
    chunks = []
    while device.scheduler.has_request("late"):
        step = device.step()
        assert step is not None
        chunks.append(step.prefill)
    assert set(chunks) <= {0, MIN_CHUNK}
    assert len(chunks) <= 200 // MIN_CHUNK + 2


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), runs_ahead=st.booleans())
@settings(max_examples=15)
def test_under_any_bound_and_load_everything_ends(seed: int, runs_ahead: bool) -> None:
    draw = Random(seed)
    config = SchedulerConfig(
        max_num_seqs=draw.choice([4, 16]),
        max_num_batched_tokens=draw.choice([16, 256, 1024]),
        max_decode_stall_ms=draw.choice([0.001, 10, 40, 1000]),
    )
    cost, _ = DEVICES[draw.choice(sorted(DEVICES))]
    device = SimulatedDevice(cost, config, noise=0.5, runs_ahead=runs_ahead, seed=seed)
    names = [str(number) for number in range(20)]
    for name in names:
        device.add(name, draw.choice([1, 20, 300, 1500]), draw.choice([1, 30]))
        for _ in range(draw.randrange(3)):
            device.step()
    for _ in range(20_000):
        if not device.scheduler.has_work():
            break
        device.step()
    assert not device.scheduler.has_work()
    limit = max(config.max_num_batched_tokens or 0, config.max_num_seqs)
    assert all(step.decode + step.prefill <= limit for step in device.steps)


def test_the_token_budget_follows_the_backend_unless_it_is_given() -> None:
    assert with_token_budget(SchedulerConfig(), "cuda").max_num_batched_tokens == CUDA_TOKEN_BUDGET
    assert with_token_budget(SchedulerConfig(), "cpu") == SchedulerConfig()
    given_one = SchedulerConfig(max_num_batched_tokens=77)
    assert with_token_budget(given_one, "cuda") is given_one
