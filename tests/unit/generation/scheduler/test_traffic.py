"""Random traffic: whatever happens, every sample's tokens are those it would get alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from tests.dict_store import DictStore
from tests.scheduler_harness import SchedulerHarness, evict

pytestmark = pytest.mark.slow

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40

# Prompts are cut from a few texts, so that prefixes are often shared, borders included.
TEXTS = tuple(tuple((7 * i + 13 * text) % 47 + 1 for i in range(30)) for text in range(2))

sampling = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 2, 3, 6]),
    max_tokens=st.sampled_from([None, 0, 1, 3, 8]),
    stop_token_ids=st.sampled_from([(), (3, 4, 5)]),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    prompt_logprobs_start=st.sampled_from([0, 0, 1, 5, 9, 99]),
    speculative=st.sampled_from([True, True, False]),
    no_repeat_ngram_size=st.sampled_from([0, 0, 0, 2]),
    forced_eos_id=st.sampled_from([None, None, 0, 9]),
)
beams = st.builds(
    BeamParams,
    width=st.sampled_from([1, 2, 3]),
    length_penalty=st.sampled_from([-1.0, 1.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
beam_sampling = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    beams=beams,
    max_tokens=st.sampled_from([None, 1, 3, 8]),
    min_tokens=st.sampled_from([0, 0, 1]),
    stop_token_ids=st.sampled_from([(), (3, 4, 5)]),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    no_repeat_ngram_size=st.sampled_from([0, 0, 2]),
    forced_eos_id=st.sampled_from([None, None, 0]),
)
SPECULATIVE = tuple(
    SpeculativeConfig(
        method="ngram" if model is None else "draft_model",
        model=model,
        num_speculative_tokens=count,
        prompt_lookup_min=shortest,
        prompt_lookup_max=3,
        disable_by_batch_size=most,
    )
    for model in (None, "draft")
    for count, shortest, most in [(1, 2, 4), (4, 1, 2), (6, 1, 32)]
)


class Traffic(RuleBasedStateMachine):
    """Adds, aborts, finishes and fails requests while steps run."""

    @initialize(
        num_blocks=st.sampled_from([10, 14, 40]),
        has_state=st.booleans(),
        keeps_states=st.booleans(),
        caching=st.booleans(),
        max_num_seqs=st.sampled_from([1, 3, 8]),
        budget=st.sampled_from([4, 9, 64]),
        per_client=st.sampled_from([None, 1, 2]),
        stall_ms=st.sampled_from([None, None, 0.001, 8, 30]),
        runs_ahead=st.booleans(),
        speculative=st.sampled_from([None, *SPECULATIVE]),
        num_stores=st.sampled_from([0, 1, 1, 2]),
        num_snapshots=st.sampled_from([1, 3, 8]),
        has_kv=st.sampled_from([True, True, False]),
        holds_back=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        has_state: bool,
        keeps_states: bool,
        caching: bool,
        max_num_seqs: int,
        budget: int,
        per_client: int | None,
        stall_ms: float | None,
        runs_ahead: bool,
        speculative: SpeculativeConfig | None,
        num_stores: int,
        num_snapshots: int,
        has_kv: bool,
        holds_back: bool,
    ) -> None:
        self.stores = [DictStore(holds_back=holds_back) for _ in range(num_stores)]
        self.make_harness = lambda: SchedulerHarness(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            has_state=has_state,
            keeps_states=keeps_states,
            num_snapshots=num_snapshots,
            has_kv=has_kv or not has_state,
            caching=caching,
            config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_num_seqs_per_client=per_client,
                max_decode_stall_ms=stall_ms,
            ),
            runs_ahead=runs_ahead,
            speculative=speculative,
            stores=self.stores,
        )
        self.harness = self.make_harness()
        self.num_requests = 0

    @rule(
        params=sampling,
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 30),
        priority=st.integers(-1, 1),
        client=st.sampled_from(["a", "b"]),
        salt=st.sampled_from([None, None, "salt"]),
        turn_start=st.sampled_from([None, 0, 7, 12, 29]),
    )
    def add(
        self,
        params: SamplingParams,
        text: tuple[int, ...],
        length: int,
        priority: int,
        client: str,
        salt: str | None,
        turn_start: int | None,
    ) -> None:
        request = GenerateRequest(
            request_id=str(self.num_requests),
            model="m",
            prompt_ids=text[:length],
            params=params,
            priority=priority,
            client=client,
            cache_salt=salt,
            turn_start=None if turn_start is None else min(turn_start, length),
        )
        self.num_requests += 1
        self.harness.add(request, seed=self.num_requests % 3)

    @rule(
        params=beam_sampling,
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 30),
        priority=st.integers(-1, 1),
        client=st.sampled_from(["a", "b"]),
    )
    def add_beams(
        self,
        params: SamplingParams,
        text: tuple[int, ...],
        length: int,
        priority: int,
        client: str,
    ) -> None:
        assert params.beams is not None
        request = GenerateRequest(
            request_id=str(self.num_requests),
            model="m",
            prompt_ids=text[:length],
            params=replace(params, n=params.beams.width),
            priority=priority,
            client=client,
        )
        self.num_requests += 1
        # Some have no room here even alone.
        with suppress(ContextLengthError, InvalidRequestError):
            self.harness.add(request)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule()
    def step_that_raises(self) -> None:
        self.harness.step(raises=True)

    @rule(count=st.integers(1, 2))
    def step_with_failed_rows(self, count: int) -> None:
        self.harness.step(fail_rows=count)

    @rule()
    def step_whose_snapshots_have_a_nan(self) -> None:
        self.harness.step(spoils=True)

    @rule(num_blocks=st.integers(0, 12), num_snapshots=st.integers(0, 4))
    def evict(self, num_blocks: int, num_snapshots: int) -> None:
        evict(self.harness.kv, num_blocks, num_snapshots)

    @precondition(lambda self: bool(self.harness.tracked))
    @rule(data=st.data(), within_step=st.booleans())
    def abort(self, data: st.DataObject, within_step: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.harness.tracked)))
        batch = self.harness.schedule() if within_step else None
        self.harness.abort(request_id)
        if batch is not None:
            self.harness.run(batch)

    @precondition(lambda self: bool(self.harness.tracked))
    @rule(data=st.data(), within_step=st.booleans())
    def finish(self, data: st.DataObject, within_step: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.harness.tracked)))
        tracked = self.harness.tracked[request_id]
        index = data.draw(st.sampled_from(sorted(tracked.outputs.keys() - tracked.ended)))
        batch = self.harness.schedule() if within_step else None
        self.harness.finish(request_id, index)
        if batch is not None:
            self.harness.run(batch)

    @precondition(lambda self: bool(self.stores))
    @rule()
    def restart(self) -> None:
        self.harness.drain()
        self.harness = self.make_harness()

    @precondition(lambda self: bool(self.stores))
    @rule()
    def blocks_arrive(self) -> None:
        self.harness.complete()

    @precondition(lambda self: bool(self.stores))
    @rule(seconds=st.sampled_from([0.001, 0.1, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.harness.now_s += seconds

    @precondition(lambda self: any(store.blocks for store in self.stores))
    @rule(data=st.data())
    def a_store_loses_a_block(self, data: st.DataObject) -> None:
        store = data.draw(st.sampled_from([each for each in self.stores if each.blocks]))
        del store.blocks[data.draw(st.sampled_from(sorted(store.blocks)))]

    @precondition(lambda self: bool(self.stores))
    @rule(data=st.data(), most=st.sampled_from([None, 0, 1, 3]))
    def a_store_returns_less(self, data: st.DataObject, most: int | None) -> None:
        data.draw(st.sampled_from(self.stores)).fail_after(most)

    @rule(reset_running=st.booleans(), clears=st.booleans())
    def reset(self, reset_running: bool, clears: bool) -> None:
        self.harness.settle()
        self.harness.scheduler.reset_prefix_cache(reset_running=reset_running)
        if clears and self.harness.tiers is not None:
            self.harness.tiers.clear()
            assert not any(store.blocks for store in self.stores)

    @invariant()
    def blocks_and_slots_are_accounted_for(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_crowd_in_a_small_pool_gets_what_each_would_get_alone(seed: int) -> None:
    randomness = Random(seed)
    harness = _crowded_harness(randomness)
    for number in range(12):
        harness.add(_random_request(randomness, number), seed=number % 3)
    for _ in range(60):
        event = randomness.random()
        if event < 0.03 and harness.tracked:
            harness.abort(randomness.choice(sorted(harness.tracked)))
        harness.step(raises=event > 0.98, fail_rows=1 if event > 0.96 else 0)
    harness.drain()


def _crowded_harness(randomness: Random) -> SchedulerHarness:
    speculative = randomness.choice([None, *SPECULATIVE])
    return SchedulerHarness(
        num_blocks=randomness.choice([10, 13, 20]),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        has_state=randomness.random() < 0.3,
        keeps_states=randomness.random() < 0.5,
        caching=randomness.random() < 0.8,
        config=SchedulerConfig(
            max_num_seqs=randomness.choice([3, 6, 12]),
            max_num_batched_tokens=randomness.choice([6, 16, 64]),
            max_num_seqs_per_client=randomness.choice([None, 2]),
            max_decode_stall_ms=randomness.choice([None, 0.001, 20]),
        ),
        runs_ahead=randomness.random() < 0.5,
        speculative=speculative,
    )


def _random_request(randomness: Random, number: int) -> GenerateRequest:
    text = randomness.choice(TEXTS)
    max_tokens = randomness.choice([None, None, 0, 8])
    return GenerateRequest(
        request_id=str(number),
        model="m",
        prompt_ids=text[: randomness.choice([1, 4, 5, 9, 13, randomness.randint(1, 30)])],
        params=SamplingParams(
            n=randomness.choice([1, 1, 2, 6]),
            max_tokens=max_tokens,
            min_tokens=0 if max_tokens == 0 else randomness.choice([0, 6]),
            ignore_eos=randomness.random() < 0.6,
            prompt_logprobs=randomness.choice([None, None, 1]),
            prompt_logprobs_start=randomness.choice([0, 0, 1, 5, 9, 99]),
        ),
        priority=randomness.randint(-1, 1),
        client=randomness.choice("ab"),
    )


def test_prompt_logprobs_are_whole_though_the_leader_ends_before_its_step() -> None:
    harness = SchedulerHarness(num_blocks=40, block_size=BLOCK_SIZE, runs_ahead=True)
    params = SamplingParams(n=2, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    harness.add(GenerateRequest(request_id="a", model="m", prompt_ids=TEXTS[0][:9], params=params))
    harness.step()
    batch = harness.schedule()
    assert batch is not None
    assert [len(row.token_ids) for row in batch.sequences] == [1, 1]
    harness.finish("a", 0)
    harness.run(batch)
    # The harness compares the other sample's prompt log-probabilities with what they should be.
    harness.drain()


def test_what_is_not_scored_comes_from_the_prefix_cache() -> None:
    harness = SchedulerHarness(num_blocks=40, block_size=BLOCK_SIZE)
    prompt = TEXTS[0][:14]
    for name, start, cached in [("a", 0, 0), ("b", 0, 0), ("c", 9, 8), ("d", 8, 4), ("e", 99, 12)]:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
        harness.add(GenerateRequest(request_id=name, model="m", prompt_ids=prompt, params=params))
        batch = harness.schedule()
        assert batch is not None
        (row,) = batch.sequences
        assert row.start == cached
        assert row.target_ids == prompt[max(1, start) :]
        harness.run(batch)
        harness.drain()


def test_a_row_that_fails_after_its_sample_ended_harms_no_other_sample() -> None:
    harness = SchedulerHarness(num_blocks=40, block_size=BLOCK_SIZE, runs_ahead=True)
    params = SamplingParams(n=2, max_tokens=9, ignore_eos=True)
    harness.add(GenerateRequest(request_id="a", model="m", prompt_ids=TEXTS[0][:9], params=params))
    harness.step()
    harness.step()
    batch = harness.schedule()
    assert batch is not None
    tracked = harness.tracked["a"]
    first = batch.sequences[0].sample
    assert first is not None
    ended = first.seed - tracked.seed
    harness.run(batch, fail_rows=1)
    harness.finish("a", ended)
    harness.drain()
    assert len(tracked.outputs[1 - ended]) == 9
