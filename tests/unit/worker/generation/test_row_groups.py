"""Prefill chunks are cut where a module would have too many scores at once."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.dense import MIN_TILE
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.row_groups import join_outputs, make_groups
from tests.unit.worker.generation.test_rebuilt_rows import SPEC

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


#: STEPS of rows, each with its start, its length and its number of proposals.
STEPS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(0, 3)).map(
        lambda row: (row[0], row[1], min(row[2], row[1] - 1))
    ),
    min_size=1,
    max_size=8,
)


@given(STEPS, st.booleans(), st.booleans())
def test_rows_with_as_many_proposals_are_one_group(
    rows: list[tuple[int, int, int]], batch_decode: bool, batch_proposals: bool
) -> None:
    sequences = [
        replace(chunk(index, start, length), verify=(SPEC,) * num_proposals)
        for index, (start, length, num_proposals) in enumerate(rows)
    ]
    groups = make_groups(
        sequences,
        ReferenceAttention(BLOCK),
        BLOCK,
        batch_decode=batch_decode,
        batch_proposals=batch_proposals,
    )
    lengths = {len(row.token_ids) for row in sequences if row.verify and row.start}
    batches = [group for group in groups if group.sequences[0].verify and group.sequences[0].start]
    if batch_proposals:
        assert len(batches) == len(lengths)
    for group in groups:
        assert len({len(row.token_ids) for row in group.sequences}) == 1
        # Only rows of one kind share a group, and prefill chunks share none.
        assert len({bool(row.verify) for row in group.sequences}) == 1
        if len(group.sequences) > 1:
            assert all(row.start for row in group.sequences)
            assert group.length == 1 or (batch_proposals and group.sequences[0].verify)
    num_rows = sum(length for _, length, _ in rows)
    for shape in ((num_rows, 1), (num_rows, 1, 3), (num_rows, 1, 2, 3)):
        packed = mx.arange(np.prod(shape).item()).reshape(shape)
        parts = [group.take(packed, num_rows) for group in groups]
        for group, part in zip(groups, parts, strict=True):
            assert part.shape == (len(group.sequences), group.length, *shape[2:])
        assert mx.array_equal(join_outputs(groups, parts), packed)
    # An array [T, 1, 1, 1] is a factor of queries, [B, H, L, D].
    factor = mx.arange(num_rows).reshape(-1, 1, 1, 1)
    for group in groups:
        taken = group.take(factor, num_rows)
        assert taken.shape == (len(group.sequences), 1, group.length, 1)
        assert taken.flatten().tolist() == group.rows.tolist()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(2, 5),
    st.sampled_from([None, 3, 16]),
)
def test_a_mask_of_a_group_is_that_of_each_sequence(
    starts: list[int], length: int, window: int | None
) -> None:
    rows = [
        replace(chunk(index, start, length), verify=(SPEC,)) for index, start in enumerate(starts)
    ]

    def masks(*, batch_proposals: bool) -> list[np.ndarray]:
        groups = make_groups(
            rows,
            ReferenceAttention(BLOCK),
            BLOCK,
            batch_decode=True,
            batch_proposals=batch_proposals,
        )
        return [np.array(group.mask(window, as_array=True)) for group in groups]

    [together] = masks(batch_proposals=True)
    for index, alone in enumerate(masks(batch_proposals=False)):
        own = together[index, 0] if len(starts) > 1 else together
        assert (own[:, : alone.shape[-1]] == alone).all()
        assert not own[:, alone.shape[-1] :].any()
