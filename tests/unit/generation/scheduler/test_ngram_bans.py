"""Runs of tokens that must not be repeated, against a search through all runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.scheduler.ngram_bans import NgramBans


def reference(size: int, token_ids: list[int]) -> set[int]:
    runs = {tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)}
    last = tuple(token_ids[len(token_ids) - size + 1 :])
    return {run[-1] for run in runs if run[:-1] == last}


@given(
    size=st.integers(1, 4),
    token_ids=st.lists(st.integers(0, 2), max_size=20),
    split=st.integers(0, 20),
)
def test_the_banned_tokens_are_those_that_complete_a_known_run(
    size: int, token_ids: list[int], split: int
) -> None:
    bans = NgramBans(size, token_ids[:split])
    bans.take(token_ids[split:])
    assert set(bans.banned) == reference(size, token_ids)


def test_a_copy_goes_its_own_way() -> None:
    bans = NgramBans(2, [1, 2, 1])
    other = bans.copy()
    bans.take([3, 1])
    assert set(bans.banned) == {2, 3}
    assert set(other.banned) == {2}


def test_a_run_of_one_bans_every_token_so_far() -> None:
    assert set(NgramBans(1, [4, 5, 4]).banned) == {4, 5}
