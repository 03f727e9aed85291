"""Where keys are cut: no threadgroup works long after the others."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_parallm.worker.attention.check import STEPS
from mlx_parallm.worker.attention.chunk_plan import LongChunk, chunk_work
from mlx_parallm.worker.attention.kernel_prefill import ROWS, THREADGROUPS
from mlx_parallm.worker.attention.key_spans import (
    ITEM_KEYS,
    MERGE_KEYS,
    MIN_SPAN,
    TILE,
    decode_span,
    prefill_span,
)

#: ``SLOTS``: threadgroups for each of the 8 key heads of an 8B model.
SLOTS = 16


def keys_until_the_end(lengths: np.ndarray, span: int, threadgroups: int) -> float:
    """Keys that the last threadgroup to end went through: each takes the longest item left."""
    whole = [span] * int((lengths // span).sum()) + (lengths % span).tolist()
    items = sorted((num_keys for num_keys in whole if num_keys), reverse=True)
    extra = ITEM_KEYS if len(items) > len(lengths) else 0
    busy = [0.0] * threadgroups
    for num_keys in items:
        heapq.heapreplace(busy, busy[0] + num_keys + extra)
    return max(busy) + (MERGE_KEYS if extra else 0)


def pieces(start: int, count: int, tokens: int = 32) -> np.ndarray:
    """Keys that each piece of a chunk sees."""
    return start + np.minimum(np.arange(0, count, tokens) + tokens, count)


@given(
    chunks=st.lists(
        st.tuples(st.integers(0, 20_000), st.integers(16, 2000)), min_size=1, max_size=8
    ),
    threadgroups=st.integers(1, 66),
)
@example(chunks=[(20_000, 16), (0, 2000)], threadgroups=40)
@example(chunks=[(16_000, 64), *[(0, 50)] * 10], threadgroups=16)
@example(chunks=[(16_000, 64), *[(0, 50)] * 31], threadgroups=16)
def test_no_other_division_ends_much_earlier(
    chunks: list[tuple[int, int]], threadgroups: int
) -> None:
    lengths = np.concatenate([pieces(*chunk) for chunk in chunks])
    span = prefill_span(np.zeros_like(lengths), lengths, threadgroups)
    assert span % TILE == 0
    num_keys = keys_until_the_end(lengths, span, threadgroups)
    others = (-(-int(lengths.max()) // (parts * TILE)) * TILE for parts in range(1, 17))
    assert num_keys <= 1.5 * min(
        keys_until_the_end(lengths, other_span, threadgroups) for other_span in others
    )


@pytest.mark.parametrize(
    ("start", "count", "parts"),
    [
        # A merge takes longer than it saves.
        (0, 512, 1),
        (0, 2048, 1),
        (300, 17, 1),
        # As many pieces as threadgroups, or many times as many.
        (13_000, 512, 1),
        (12_000, 4096, 1),
        (13_000, 256, 2),
        (5000, 128, 4),
        (15_000, 16, 16),
    ],
)
def test_keys_are_cut_where_threadgroups_would_be_idle(start: int, count: int, parts: int) -> None:
    ends = pieces(start, count)
    span = prefill_span(np.zeros_like(ends), ends, SLOTS)
    assert -(-int(ends.max()) // span) == parts


@pytest.mark.parametrize(
    ("kv_heads", "share"),
    [(kv, share) for kv in (1, 2, 8, 16, 32, 64) for share in (1, 2, 4, 8, 16) if kv * share < 129],
)
def test_the_check_at_start_has_a_chunk_whose_keys_are_cut(kv_heads: int, share: int) -> None:
    chunks = [
        LongChunk(0, count, start, tuple(range(-(-(start + count) // 16))))
        for _, start, count in STEPS[-1]
        if count >= 16
    ]
    work = chunk_work(chunks, ROWS // share, None, max(1, THREADGROUPS // kv_heads))
    assert work.spans is not None


@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=200),
    threadgroups=st.integers(1, 64),
    least=st.sampled_from([MIN_SPAN, 512]),
)
def test_decode_items_are_about_their_share(
    lengths: list[int], threadgroups: int, least: int
) -> None:
    ends = np.array(lengths)
    span = decode_span(np.zeros_like(ends), ends, 1 / threadgroups, least)
    share = max(sum(lengths) / threadgroups, least)
    assert span % MIN_SPAN == 0
    assert min(max(lengths), 2 / 3 * share) <= span <= max(1.7 * share, share + MIN_SPAN)
    assert (-(-ends // span)).sum() <= threadgroups + 2 * len(lengths)


def test_rows_that_are_little_longer_than_their_share_are_not_cut() -> None:
    for length in (64, 513, 520, 700, 760):
        ends = np.full(32, length)
        assert decode_span(np.zeros_like(ends), ends, 1 / 32, 512) >= length
    # Longer ones are cut into equal parts.
    ends = np.full(32, 1600)
    assert decode_span(np.zeros_like(ends), ends, 1 / 64) == 832
