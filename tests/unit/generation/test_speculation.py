"""Prompt lookup against a search through the whole sequence, and when it is tried."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.generation import speculation
from mlx_parallm.generation.speculation import (
    LONGEST_PAUSE,
    MAX_CANDIDATES,
    NgramIndex,
    Speculation,
)
from mlx_parallm.types.errors import ConfigError

# Few different tokens, so that they repeat.
texts = st.lists(st.integers(0, 3), max_size=60)


def search(tokens: Sequence[int], shortest: int, longest: int, most: int) -> tuple[int, ...]:
    """Return what an index must propose: compare the end with every place, the latest first."""
    best, best_size, seen = 0, 0, 0
    for end in range(len(tokens) - 1, 0, -1):
        size = 0
        while size < min(longest, end) and tokens[end - 1 - size] == tokens[-1 - size]:
            size += 1
        if size < shortest:
            continue
        seen += 1
        if size > best_size and seen <= MAX_CANDIDATES:
            best, best_size = end, size
    period = len(tokens) - best
    return tuple(tokens[best + i % period] for i in range(most)) if best else ()


@given(
    text=texts,
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    most=st.integers(1, 6),
    steps=st.lists(st.integers(1, 9), max_size=8),
)
def test_it_proposes_what_followed_the_longest_latest_match(
    text: list[int], shortest: int, more: int, most: int, steps: list[int]
) -> None:
    index = NgramIndex(shortest, shortest + more)
    length = 0
    for step in [*steps, len(text)]:
        length = min(length + step, len(text))
        part = text[:length]
        assert index.propose(part, most) == search(part, shortest, shortest + more, most)


def test_a_loop_goes_on_beyond_the_end() -> None:
    assert NgramIndex(2, 4).propose([9, 1, 2, 3, 1, 2, 3], 5) == (1, 2, 3, 1, 2)


def test_a_long_prompt_is_indexed_over_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MAX_INDEXED", 10)
    tokens = [*range(30), 3, 4]
    index = NgramIndex(2, 2)
    proposals = [index.propose(tokens, 2) for _ in range(4)]
    assert proposals == [(), (), (5, 6), (5, 6)]


def test_refused_drafts_pause_ever_longer_and_a_good_one_ends_it() -> None:
    pace, length, pauses = Speculation(SpeculativeConfig()), 0, []
    for _ in range(8):
        pace.record(length, 4, 0)
        start = length
        while not pace.allows(length):
            length += 1
        pauses.append(length - start)
    assert pauses == [2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    pace.record(length, 4, 1)
    assert pace.allows(length)
    pace.record(length, 4, 2)
    pace.record(length, 4, 0)
    assert not pace.allows(length + 1)
    assert pace.allows(length + 2)


def test_a_token_awaited_in_vain_counts_as_a_refused_draft() -> None:
    state = Speculation(SpeculativeConfig(prompt_lookup_min=2))
    tokens = [1, 2, 3, 1, 2]
    assert state.awaits(tokens)
    assert state.propose([*tokens, 7], 4) == ()
    assert not state.awaits([*tokens, 7])
    assert state.propose([*tokens, 7, 1, 2], 1) == (7,)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"method": "eagle"}, "eagle"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size"),
        ({"lookups": 1}, "lookups"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig.from_mapping(values)
