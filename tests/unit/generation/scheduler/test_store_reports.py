"""Inputs on which other servers with KV below their pools hung, leaked or gave wrong tokens."""

from __future__ import annotations

import pytest

from mlx_parallm.config import SchedulerConfig
from tests.dict_store import DictStore
from tests.scheduler_harness import SchedulerHarness
from tests.stored_prompts import (
    NUM_FOUND,
    OTHER,
    PROMPT,
    SIZE,
    ask,
    fill_store,
    harness_of,
    num_filled,
)

LONG, LONGER = (tuple((k * i) % 41 + 1 for i in range(60)) for k in (3, 5))
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)


def filled_store(*prompts: tuple[int, ...]) -> DictStore:
    """Return a store that has prompts; its fetches are held back."""
    store = DictStore(holds_back=True)
    fill_store(store, *prompts)
    return store


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("most", [0, 2])
def test_several_requests_share_a_prefix_whose_read_fails(most: int, *, runs_ahead: bool) -> None:
    """vLLM #49250, #37827: recomputed requests went on at the wrong position."""
    store = filled_store(PROMPT)
    store.fail_after(most)
    harness = harness_of(store, runs_ahead=runs_ahead)
    for number in range(4):
        ask(harness, str(number), PROMPT[: 30 - number], max_tokens=5)
    harness.drain()
    assert num_filled(harness) == most


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_two_chains_that_do_not_fit_the_pool_together_end(*, runs_ahead: bool) -> None:
    """vLLM #45388, #57104: each held blocks for what was read, and waited for the other's."""
    store = filled_store(LONG, LONGER)
    harness = harness_of(store, num_blocks=17, config=CONFIG, runs_ahead=runs_ahead)
    ask(harness, "a", (*LONG, 1, 2), max_tokens=2)
    ask(harness, "b", (*LONGER, 1, 2), max_tokens=2)
    assert harness.step() is None
    assert harness.scheduler.stats().kv_usage == 0
    harness.drain()
    assert num_filled(harness) == 2 * 15


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_a_head_that_does_not_fit_strands_no_sequence_whose_blocks_were_read(
    priority: int,
) -> None:
    """vLLM #45406, #57841: blocks of a sequence behind the head were never given back."""
    store = filled_store(LONG)
    harness = harness_of(store, num_blocks=20, config=CONFIG)
    ask(harness, "runs", OTHER[:9], max_tokens=12)
    harness.step()
    ask(harness, "is read", LONG, max_tokens=2)
    harness.step()
    ask(harness, "too large for now", OTHER * 2, max_tokens=2, priority=priority)
    harness.step()
    harness.complete()
    harness.drain()
    assert num_filled(harness) == 14


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_a_better_request_ends_though_reads_hold_all_slots(max_num_seqs: int) -> None:
    """vLLM #42568: the head waited for a slot that a read held, and the read for the head."""
    store = filled_store(PROMPT, OTHER)
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    harness = harness_of(store, config=config)
    ask(harness, "read", PROMPT, priority=1)
    ask(harness, "read too", OTHER, priority=1)
    harness.step()
    ask(harness, "better", LONG, priority=-1)
    harness.step()
    harness.complete()
    harness.drain()


def test_a_hit_that_memory_has_meanwhile_is_given_back() -> None:
    """LMCache #1034, vLLM #44100: what was found below but not needed stayed pinned."""
    store = DictStore(holds_back=True)
    harness = harness_of(store, runs_ahead=True)
    ask(harness, "computes", PROMPT, max_tokens=8)
    harness.step()
    harness.step()
    fill_store(store)
    ask(harness, "finds", PROMPT)
    harness.drain()
    assert num_filled(harness) in (0, NUM_FOUND - 4)
    assert harness.tiers is not None
    harness.tiers.check_integrity([])


@pytest.mark.parametrize("num_steps", range(5))
def test_a_request_that_is_aborted_at_any_time_leaves_nothing(num_steps: int) -> None:
    """vLLM #46283, SGLang #40334: locks and blocks of aborted requests were never given back."""
    store = filled_store(PROMPT)
    harness = harness_of(store, runs_ahead=True)
    ask(harness, "leaves", max_tokens=9)
    ask(harness, "stays", max_tokens=9)
    for number in range(num_steps):
        harness.step()
        if number == 1:
            harness.complete()
    harness.abort("leaves")
    harness.scheduler.check_integrity()
    harness.drain()


def test_preemption_beside_reads_goes_on() -> None:
    """vllm-ascend #16315: sequences were preempted and began anew, for ever."""
    store = filled_store(LONG, LONGER)
    for num_blocks in (16, 18, 24):
        harness: SchedulerHarness = harness_of(
            store, num_blocks=num_blocks, config=CONFIG, runs_ahead=True
        )
        for number in range(6):
            prompt = (LONG, LONGER)[number % 2]
            ask(harness, str(number), prompt[: 60 - 4 * number], max_tokens=3)
        harness.drain(limit=300)


def test_a_scored_prompt_is_read_up_to_what_is_scored() -> None:
    """vLLM #57596: prompts with log-probabilities counted as misses, or were found too far."""
    store = filled_store(PROMPT)
    harness = harness_of(store)
    ask(harness, "scored", prompt_logprobs=1, prompt_logprobs_start=14)
    harness.drain()
    assert num_filled(harness) == 13 // SIZE
