"""Beams among other requests: each gets what it would get alone, and no block or slot is lost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.generation.scheduler.updates import SequenceUpdate
from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.events import FinishReason
from mlx_parallm.types.request import GenerateRequest, SamplingParams, WeightsVersion
from mlx_parallm.types.step import ScheduledSequence
from tests.scheduler_harness import SchedulerHarness, Tracked

TEXTS = tuple(tuple((7 * i + 13 * text) % 47 + 1 for i in range(30)) for text in range(2))
NGRAMS = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)


def beam_request(name: str, length: int = 9, width: int = 3, **params: object) -> GenerateRequest:
    """Return a request with beams; ``params`` are those of sampling."""
    settings_of = {"max_tokens": 8, "n": width, **params}
    return GenerateRequest(
        request_id=name,
        model="m",
        prompt_ids=TEXTS[0][:length],
        params=SamplingParams(temperature=0.0, beams=BeamParams(width=width), **settings_of),  # type: ignore[arg-type]
    )


def greedy_request(name: str, length: int = 9, **fields: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = TEXTS[1][:length]
    return GenerateRequest(request_id=name, model="m", prompt_ids=prompt, params=params, **fields)  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_crowd_in_a_small_pool_gets_what_each_would_get_alone(seed: int) -> None:
    randomness = Random(seed)
    harness = _crowded_harness(randomness)
    for number in range(10):
        with suppress(ContextLengthError, InvalidRequestError):
            harness.add(_random_request(randomness, number), seed=number % 3)
    for _ in range(60):
        event = randomness.random()
        if event < 0.03 and harness.tracked:
            harness.abort(randomness.choice(sorted(harness.tracked)))
        if 0.03 < event < 0.06:
            harness.settle()
            harness.scheduler.recompute_running()
        harness.step(raises=event > 0.99, fail_rows=1 if event > 0.98 else 0)
    harness.drain()


def _crowded_harness(randomness: Random) -> SchedulerHarness:
    return SchedulerHarness(
        num_blocks=randomness.choice([13, 20, 60]),
        max_model_len=40,
        has_state=randomness.random() < 0.3,
        caching=randomness.random() < 0.8,
        config=SchedulerConfig(
            max_num_seqs=randomness.choice([4, 6, 12]),
            max_num_batched_tokens=randomness.choice([6, 16, 64]),
            max_num_seqs_per_client=randomness.choice([None, None, 4]),
            max_decode_stall_ms=randomness.choice([None, 0.001, 20]),
        ),
        runs_ahead=randomness.random() < 0.6,
        speculative=randomness.choice([None, NGRAMS]),
    )


def _random_request(randomness: Random, number: int) -> GenerateRequest:
    width = randomness.choice([1, 2, 3, 4, 6])
    has_beams = randomness.random() < 0.5
    beams = BeamParams(
        width=width,
        length_penalty=randomness.choice([-1.0, 0.0, 1.0, 2.0]),
        early_stopping=randomness.choice([True, False, "never"]),
        num_counted=randomness.choice([0, 1]),
    )
    text = randomness.choice(TEXTS)
    return GenerateRequest(
        request_id=str(number),
        model="m",
        prompt_ids=text[: randomness.choice([1, 4, 5, 9, 13, randomness.randint(1, 30)])],
        params=SamplingParams(
            n=randomness.randint(1, width) if has_beams else randomness.choice([1, 3]),
            beams=beams if has_beams else None,
            temperature=0.0 if has_beams else 1.0,
            max_tokens=randomness.choice([None, 1, 5, 12]),
            min_tokens=randomness.choice([0, 0, 1]),
            stop_token_ids=randomness.choice([(), (3, 4, 5)]),
            ignore_eos=randomness.random() < 0.3,
            prompt_logprobs=randomness.choice([None, None, 1]),
            no_repeat_ngram_size=randomness.choice([0, 0, 2, 3]),
            forced_eos_id=randomness.choice([None, None, 0]) if has_beams else None,
            logprobs=randomness.choice([None, 2]) if has_beams else None,
        ),
        priority=randomness.randint(-1, 1),
        client=randomness.choice("ab"),
    )


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_beams_run_in_one_step_and_others_run_ahead(runs_ahead: bool) -> None:
    harness = SchedulerHarness(
        num_blocks=80, config=SchedulerConfig(max_num_seqs=8), runs_ahead=runs_ahead
    )
    harness.add(greedy_request("greedy"))
    harness.add(beam_request("beams"))
    harness.drain()
    widths = list(map(count_beams, sampled(harness)))
    assert set(widths) <= {0, 1, 3}
    assert widths.count(3) == 7
    if runs_ahead:
        # While beams wait for their tokens, the other request runs.
        between = [rows for rows in sampled(harness) if not count_beams(rows)]
        assert between
        assert all(len(rows) == 1 for rows in between)


def count_beams(rows: Sequence[ScheduledSequence]) -> int:
    """Return how many rows report candidates."""
    return sum(row.sample is not None and row.sample.params.logprobs is not None for row in rows)


def sampled(harness: SchedulerHarness) -> list[list[ScheduledSequence]]:
    return [[row for row in batch.sequences if row.sample] for batch in harness.batches]


def test_a_beam_copies_at_most_one_block_a_step() -> None:
    harness = SchedulerHarness(num_blocks=80, config=SchedulerConfig(max_num_seqs=8))
    harness.add(beam_request("beams", width=6))
    harness.drain()
    assert all(len(batch.block_copies) <= 5 for batch in harness.batches)
    assert sum(len(batch.block_copies) for batch in harness.batches) > 0


def test_beams_take_all_their_slots_at_once_or_wait() -> None:
    harness = SchedulerHarness(num_blocks=80, config=SchedulerConfig(max_num_seqs=4))
    harness.add(greedy_request("greedy"))
    harness.add(greedy_request("other"))
    harness.step()
    harness.add(beam_request("beams"))
    harness.add(greedy_request("late"))
    for _ in range(5):
        batch = harness.step()
        assert batch is not None
        # Two slots are free, which the beams that wait at the head are to have.
        assert len(batch.sequences) == 2
    harness.drain()


def test_slots_for_further_beams_are_given_to_nobody_else() -> None:
    harness = SchedulerHarness(num_blocks=80, config=SchedulerConfig(max_num_seqs=4))
    harness.add(beam_request("beams"))
    harness.add(greedy_request("a"))
    harness.add(greedy_request("b"))
    for _ in range(4):
        batch = harness.step()
        assert batch is not None
        assert len(batch.sequences) <= 4
        assert len(batch.sequences) - count_beams(batch.sequences) <= 1
    assert harness.scheduler.stats().num_waiting == 1
    harness.drain()


def test_beams_are_preempted_together_and_start_again_together() -> None:
    harness = SchedulerHarness(num_blocks=14, config=SchedulerConfig(max_num_seqs=8))
    harness.add(beam_request("beams", length=9, max_tokens=12))
    for _ in range(4):
        harness.step()
    harness.add(greedy_request("better", length=28, priority=-1))
    harness.drain()
    assert harness.scheduler.stats().num_preemptions >= 3
    assert set(map(count_beams, sampled(harness))) <= {0, 1, 3}


@pytest.mark.parametrize(
    ("width", "config", "param"),
    [
        (5, SchedulerConfig(max_num_seqs=4), "beam_width"),
        (3, SchedulerConfig(max_num_seqs=4, max_num_seqs_per_client=2), "beam_width"),
    ],
)
def test_more_beams_than_may_run_are_refused(
    width: int, config: SchedulerConfig, param: str
) -> None:
    harness = SchedulerHarness(num_blocks=80, config=config)
    with pytest.raises(InvalidRequestError) as refusal:
        harness.add(beam_request("beams", width=width))
    assert refusal.value.param == param


def test_beams_that_can_never_fit_the_pool_are_refused() -> None:
    harness = SchedulerHarness(num_blocks=10)
    # Two blocks of prompt are shared; three beams have (10 - 2) // 3 further ones each.
    harness.add(beam_request("fits", length=9, max_tokens=7))
    with pytest.raises(ContextLengthError, match="3 beams"):
        harness.add(beam_request("too long", length=9, max_tokens=8))
    harness.drain()


def test_a_request_with_beams_that_is_aborted_leaves_nothing() -> None:
    for num_steps in range(8):
        for runs_ahead in (False, True):
            harness = SchedulerHarness(num_blocks=40, runs_ahead=runs_ahead)
            harness.add(beam_request("beams"))
            for _ in range(num_steps):
                harness.step()
            if "beams" in harness.tracked:
                harness.abort("beams")
            harness.drain()


class RecordingHarness(SchedulerHarness):
    """Keeps updates instead of comparing results with those of one version of the weights."""

    def __init__(self, **settings_of: Any) -> None:
        super().__init__(**settings_of)
        self.updates: list[SequenceUpdate] = []

    @override
    def _hear(self, update: SequenceUpdate) -> None:
        self.updates.append(update)
        super()._hear(update)

    @override
    def _check_output(self, tracked: Tracked, update: SequenceUpdate) -> None:
        pass


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_steps", range(7))
def test_beams_go_on_with_changed_weights(
    num_steps: int, runs_ahead: bool, has_state: bool
) -> None:
    harness = RecordingHarness(num_blocks=80, runs_ahead=runs_ahead, has_state=has_state)
    harness.add(beam_request("beams", ignore_eos=True, logprobs=0))
    for _ in range(num_steps):
        harness.step()
    harness.settle()
    harness.weights.base.version = WeightsVersion(content="new", label="new")
    harness.scheduler.refresh_weights()
    harness.scheduler.check_integrity()
    harness.drain()
    for index in range(3):
        parts = [each for each in harness.updates if each.index == index and each.token]
        # Tokens of each version come together, the old ones first.
        assert [each.version for each in parts] in (["new"], ["default", "new"], ["default"])
        assert sum(1 + len(each.earlier) for each in parts) == 8
        assert parts[-1].finish_reason is FinishReason.LENGTH
    # A later request finds nothing that both versions have computed.
    harness.add(beam_request("later", ignore_eos=True))
    harness.drain()


def test_the_leader_prefills_what_all_beams_share_once() -> None:
    harness = SchedulerHarness(
        num_blocks=80,
        caching=False,
        config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    harness.add(beam_request("beams", length=20, width=6))
    for _ in range(3):
        harness.step()
    harness.scheduler.recompute_running()
    batch = harness.step()
    assert batch is not None
    assert [(row.start, len(row.token_ids)) for row in batch.sequences] == [(0, 20)]
    batch = harness.step()
    assert batch is not None
    assert {row.start for row in batch.sequences} <= {20, 21}
    harness.drain()


def test_no_token_is_computed_twice() -> None:
    # Each beam was a request of one token in vLLM (issue 8306), and looked all up again.
    harness = SchedulerHarness(num_blocks=80, caching=False, config=SchedulerConfig(max_num_seqs=8))
    harness.add(beam_request("beams", length=9, width=5, ignore_eos=True))
    harness.drain()
    sizes = [[len(row.token_ids) for row in batch.sequences] for batch in harness.batches]
    assert sizes == [[9], *[[1] * 5] * 7]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_search_without_an_end_ends_at_its_length(early_stopping: Any) -> None:
    # vLLM went on for ever (issue 7965).
    harness = SchedulerHarness(num_blocks=80, max_model_len=20)
    params = SamplingParams(
        temperature=0.0,
        n=2,
        beams=BeamParams(width=2, early_stopping=early_stopping),
        ignore_eos=True,
    )
    request = GenerateRequest(request_id="a", model="m", prompt_ids=TEXTS[0][:9], params=params)
    harness.add(request)
    tracked = harness.tracked["a"]
    harness.drain()
    assert [len(tokens) for tokens in tracked.outputs.values()] == [11, 11]


def test_a_weight_update_during_forks_loses_no_beam() -> None:
    harness = RecordingHarness(num_blocks=80, config=SchedulerConfig(max_num_seqs=8))
    harness.add(beam_request("beams", width=5, ignore_eos=True))
    for step in range(7):
        harness.step()
        harness.weights.base.version = WeightsVersion(content=str(step), label=str(step))
        harness.scheduler.refresh_weights()
        harness.scheduler.check_integrity()
    harness.drain()
    assert {each.index for each in harness.updates if each.token} == set(range(5))


def test_beams_start_with_blocks_for_all_of_them_or_wait() -> None:
    harness = SchedulerHarness(num_blocks=11, config=SchedulerConfig(max_num_seqs=8))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    harness.add(
        GenerateRequest(request_id="greedy", model="m", prompt_ids=TEXTS[1][:25], params=params)
    )
    harness.step()
    # 4 blocks are free: 3 for the prompt, but only one for the forks of two further beams.
    harness.add(beam_request("beams", length=9, max_tokens=4))
    batch = harness.step()
    assert batch is not None
    assert len(batch.sequences) == 1
    harness.drain()
    assert harness.scheduler.stats().num_preemptions == 0
