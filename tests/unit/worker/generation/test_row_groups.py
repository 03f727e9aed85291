"""Prefill chunks are cut where a module would have too many scores at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.dense import MIN_TILE
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.row_groups import make_groups

BLOCK = 16


def chunk(seq_id: int, start: int, length: int) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=seq_id,
        slot=seq_id,
        start=start,
        token_ids=tuple(range(length)),
        block_table=tuple(range((start + length) // BLOCK + 1)),
        adapter_slot=3,
    )


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=4),
    st.one_of(st.just(float("inf")), st.floats(1, 1e5)),
    st.booleans(),
)
def test_parts_of_chunks_are_the_chunks(
    chunks: list[tuple[int, int]], most: float, batch_decode: bool
) -> None:
    sequences = [chunk(index, start, length) for index, (start, length) in enumerate(chunks)]
    groups = make_groups(
        sequences, ReferenceAttention(BLOCK), BLOCK, batch_decode=batch_decode, max_scores=most
    )
    rows = np.concatenate([group.rows for group in groups])
    assert sorted(rows.tolist()) == list(range(sum(length for _, length in chunks)))
    joined: dict[int, ScheduledSequence] = {}
    for before, group in zip([None, *groups], groups, strict=False):
        for part in group.sequences:
            known = joined.get(part.seq_id)
            assert group.continues == (known is not None)
            if known is not None:
                assert before is not None
                assert before.sequences == [joined_tail(known, before.length)]
                part = replace(part, start=known.start, token_ids=known.token_ids + part.token_ids)
            joined[part.seq_id] = part
        assert group.length <= MIN_TILE or group.length * group.padded_len <= most * (1 + 1e-9)
    assert sorted(joined.values(), key=lambda part: part.seq_id) == sequences


def joined_tail(sequence: ScheduledSequence, length: int) -> ScheduledSequence:
    """Return the last part of a sequence."""
    start = sequence.start + len(sequence.token_ids) - length
    return replace(sequence, start=start, token_ids=sequence.token_ids[-length:])
