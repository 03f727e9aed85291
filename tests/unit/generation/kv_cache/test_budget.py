"""Models share one budget of KV: a context each first, the rest by want."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.kv_cache.budget import KVShare, most_bytes, report_cut, share_budget
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.step import KVPlan

BLOCK = 16


def plan(length: int, *, seqs: int = 128, token_bytes: int = 1) -> KVPlan:
    """Return the claim of a model for ``seqs`` sequences of ``length`` tokens."""
    context = -(-length // BLOCK)
    return KVPlan(BLOCK, token_bytes * BLOCK, context * seqs, length)


PLANS = st.lists(
    st.builds(
        plan,
        st.integers(1, 500),
        seqs=st.integers(1, 9),
        token_bytes=st.integers(1, 40),
    ),
    min_size=1,
    max_size=6,
)
SPARE = st.one_of(st.integers(0, 3000), st.integers(0, 3_000_000))


def least(plans: list[KVPlan]) -> int:
    """Return the smallest budget: one block each."""
    return sum(claim.block_bytes for claim in plans)


def taken(blocks: list[int], plans: list[KVPlan]) -> int:
    return sum(count * claim.block_bytes for count, claim in zip(blocks, plans, strict=True))


def test_a_small_model_beside_a_large_one_keeps_its_context() -> None:
    small, large = plan(600, token_bytes=5), plan(131_072, token_bytes=40)
    blocks = share_budget([small, large], 1 << 24)
    assert blocks[0] * BLOCK >= 600
    assert blocks[1] * BLOCK >= 131_072


def test_a_context_of_an_encoder_decoder_has_a_source() -> None:
    speech = replace(plan(448, token_bytes=5), max_source_len=1500)
    blocks = share_budget([speech, plan(131_072, token_bytes=40)], 1 << 24)
    assert blocks[0] * BLOCK >= 448 + 1500


def test_where_contexts_do_not_fit_they_are_cut_evenly() -> None:
    plans = [plan(600, token_bytes=4), *(plan(131_072, token_bytes=4) for _ in range(11))]
    blocks = share_budget(plans, 64 << 16)
    assert blocks[0] * BLOCK >= 600
    assert len(set(blocks[1:])) == 1
    assert blocks[1] * BLOCK > 80_000


@given(PLANS, SPARE)
def test_the_budget_is_kept_and_nearly_used(plans: list[KVPlan], spare: int) -> None:
    budget = least(plans) + spare
    blocks = share_budget(plans, budget)
    rest = budget - taken(blocks, plans)
    assert 0 <= rest < 2 * least(plans)


@given(PLANS, SPARE)
def test_each_model_has_a_context_or_as_much_as_any_other(plans: list[KVPlan], spare: int) -> None:
    blocks = share_budget(plans, least(plans) + spare)
    assert all(count >= 1 for count in blocks)
    for count, claim in zip(blocks, plans, strict=True):
        if count >= claim.context_blocks:
            continue
        for others, other in zip(blocks, plans, strict=True):
            assert others <= other.context_blocks
            assert others == 1 or others * other.block_bytes < (
                count + 1
            ) * claim.block_bytes + max(claim.block_bytes, other.block_bytes)


@given(PLANS, SPARE)
def test_nothing_is_cut_that_fits(plans: list[KVPlan], spare: int) -> None:
    budget = sum(claim.context_blocks * claim.block_bytes for claim in plans) + spare
    blocks = share_budget(plans, budget)
    assert all(n >= claim.context_blocks for n, claim in zip(blocks, plans, strict=True))


@given(PLANS)
def test_a_budget_of_all_wants_gives_each_its_want(plans: list[KVPlan]) -> None:
    budget = sum(claim.wanted_bytes for claim in plans)
    assert share_budget(plans, budget) == [claim.wanted_blocks for claim in plans]


@given(PLANS, SPARE, st.integers(0, 5000))
def test_a_larger_budget_takes_nothing_from_any_model(
    plans: list[KVPlan], spare: int, more: int
) -> None:
    budget = least(plans) + spare
    pairs = zip(share_budget(plans, budget), share_budget(plans, budget + more), strict=True)
    assert all(before <= after for before, after in pairs)


@given(PLANS, SPARE, st.integers(1, 100))
def test_who_wants_more_gets_no_less(plans: list[KVPlan], spare: int, more: int) -> None:
    budget = least(plans) + spare
    greedy = replace(plans[0], wanted_blocks=plans[0].wanted_blocks + more)
    assert share_budget([greedy, *plans[1:]], budget)[0] >= share_budget(plans, budget)[0]


@given(PLANS, SPARE, st.randoms(use_true_random=False))
def test_the_order_of_the_models_does_not_matter(
    plans: list[KVPlan], spare: int, randomness: st.DataObject
) -> None:
    budget = least(plans) + spare
    order = list(range(len(plans)))
    randomness.shuffle(order)  # type: ignore[attr-defined]
    shuffled = share_budget([plans[place] for place in order], budget)
    blocks = share_budget(plans, budget)
    assert shuffled == [blocks[place] for place in order]


@given(PLANS)
def test_less_than_a_block_of_each_model_is_refused(plans: list[KVPlan]) -> None:
    with pytest.raises(ConfigError, match="does not hold one block"):
        share_budget(plans, least(plans) - 1)


def test_a_share_says_what_fits() -> None:
    share = KVShare("m", plan(600, token_bytes=1024), 1000)
    assert (share.num_tokens, share.context, share.is_cut) == (16_000, 600, False)
    assert str(share) == (
        "15.62 MiB of KV: 1,000 blocks of 16 tokens, 16,000 tokens, 26.7 contexts of 600 tokens"
    )
    cut = replace(share, num_blocks=30)
    assert (cut.context, cut.is_cut) == (480, True)


def test_a_context_that_was_configured_is_not_cut_where_engines_divide_the_memory() -> None:
    share = KVShare("m", plan(600), 30)
    with pytest.raises(ConfigError, match=r"m is 600, .* each engine holds 480 .*--data-parallel"):
        report_cut(share, 600, 2)


@pytest.mark.parametrize(("configured", "num_engines"), [(None, 2), (600, 1), (None, 1)])
def test_other_contexts_are_cut_with_a_warning(
    configured: int | None, num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        report_cut(KVShare("m", plan(600), 30), configured, num_engines)
    assert "cut from 600 to 480 tokens" in caplog.text
    assert ("--data-parallel-size" in caplog.text) is (num_engines > 1)


def test_a_refusal_names_the_engines_that_divide_the_memory() -> None:
    with pytest.raises(ConfigError, match="the share of one of 4 engines"):
        share_budget([plan(600)], 1, 4)
    with pytest.raises(ConfigError) as refused:
        share_budget([plan(600)], 1)
    assert "engines" not in str(refused.value)


@pytest.mark.parametrize("limit", [None, 0, 1000, 1 << 50])
@pytest.mark.parametrize("has_kv", [True, False])
@given(
    num_blocks=st.integers(1, 3000) | st.integers(1, 9),
    context=st.integers(1, 1500),
    block_bytes=st.integers(1, 300),
    state_bytes=st.integers(1, 9000),
)
def test_snapshots_take_a_part_of_the_share(
    limit: int | None,
    num_blocks: int,
    context: int,
    block_bytes: int,
    state_bytes: int,
    *,
    has_kv: bool,
) -> None:
    claim = KVPlan(BLOCK, block_bytes, 0, context * BLOCK, state_bytes=state_bytes, has_kv=has_kv)
    whole = KVShare("m", claim, num_blocks)
    share = whole.with_snapshots(limit)
    eighth = whole.num_bytes // 8
    wanted = (
        min(64 * state_bytes, eighth if has_kv else whole.num_bytes) if limit is None else limit
    )
    assert share.snapshot_bytes <= min(wanted, whole.num_bytes)
    if num_blocks > 1:
        # A context that takes all the memory, or is cut already, leaves an eighth for snapshots.
        assert share.num_snapshots >= min(wanted, eighth) // state_bytes
    if has_kv:
        assert share.num_bytes <= whole.num_bytes
        assert share.num_blocks >= max(1, min(context, num_blocks - -(-eighth // block_bytes)))
    else:
        assert share.num_blocks == num_blocks


def test_a_model_without_kv_has_memory_for_its_states_beside_another_model() -> None:
    large = plan(131_072, token_bytes=40)
    without = KVPlan(BLOCK, 64 * BLOCK, 128 * 64, 1024, state_bytes=20 << 20, has_kv=False)
    blocks = share_budget([large, without], 8 << 30)
    assert KVShare("m", without, blocks[1]).with_snapshots(None).num_snapshots >= 16


def test_no_models_share_nothing() -> None:
    assert share_budget([], 0) == []


GIB = 1 << 30
# WEIGHTS: of models of 0.6 and 8 billion parameters in 4 bits, in bytes.
SMALL, LARGE = 340 << 20, 4700 << 20


@pytest.mark.parametrize(
    ("backend", "weights", "unused", "engines", "most"),
    [
        ("cuda", LARGE, GIB, 1, None),
        ("cpu", SMALL, 64 * GIB, 1, GIB),
        ("cpu", LARGE, GIB, 1, LARGE),
        ("metal", 5 << 20, 64 * GIB, 1, GIB),
        ("metal", SMALL, 10 * GIB, 1, 10 * GIB // 4),
        ("metal", SMALL, 60 * GIB, 1, 16 * SMALL),
        ("metal", SMALL, 60 * GIB, 4, 15 * GIB // 4),
        ("metal", LARGE, 40 * GIB, 1, 10 * GIB),
        ("metal", LARGE, 40 * GIB, 2, 5 * GIB),
        ("metal", LARGE, 2 * GIB, 1, GIB),
        ("metal", LARGE, 0, 1, GIB),
        ("metal", SMALL, None, 1, 16 * SMALL),
    ],
)
def test_a_device_bounds_kv(
    backend: str, weights: int, unused: int | None, engines: int, most: int | None
) -> None:
    assert most_bytes(backend, weights, unused, engines) == most
