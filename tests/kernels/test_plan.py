"""Index arrays of the kernels: each row attends to exactly what it sees, wherever it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.chunk_plan import LONG_CHUNK
from mlx_parallm.worker.attention.kernel_plan import Division, HeldTables, KernelPlan
from mlx_parallm.worker.attention.key_spans import MIN_SPAN

BLOCK_SIZE = 16
DIVISION = Division(heads=8, threadgroups=512)
#: Sequences: (positions already computed, tokens of the step).
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([1, 1, 1, 2, LONG_CHUNK - 1, LONG_CHUNK, 40])),
    min_size=1,
    max_size=12,
)


def scheduled(sequences: list[tuple[int, int]]) -> list[ScheduledSequence]:
    return [
        ScheduledSequence(
            seq_id=i,
            slot=i,
            start=start,
            token_ids=(1,) * count,
            block_table=tuple(range(i * 1000, i * 1000 + -(-(start + count) // BLOCK_SIZE))),
        )
        for i, (start, count) in enumerate(sequences)
    ]


@given(
    sequences=SEQUENCES,
    window=st.none() | st.integers(1, 6000),
    heads=st.sampled_from([1, 8]),
    threadgroups=st.sampled_from([1, 16, 512]),
)
def test_items_are_what_rows_see(
    sequences: list[tuple[int, int]], window: int | None, heads: int, threadgroups: int
) -> None:
    plan = KernelPlan(scheduled(sequences), BLOCK_SIZE)
    work = plan.work(window, Division(heads, threadgroups))
    items = np.array(work.items)
    wanted, row, sequence = [], 0, 0
    for start, count in sequences:
        if count < LONG_CHUNK:
            for position in range(start, start + count):
                first = 0 if window is None else max(position + 1 - window, 0)
                wanted.append((row + position - start, sequence, first, position + 1))
            sequence += 1
        row += count
    assert plan.num_rows == len(wanted)
    spans = [(i, 1) for i in range(len(wanted))] if work.spans is None else np.array(work.spans)
    count = sum(count for _, count in spans)
    # The number of items of cut rows does not depend on their keys.
    padded = 0 if work.spans is None else threadgroups // heads + 2 * len(wanted)
    assert len(items) == max(count, padded)
    assert not items[count:].any()
    for (first_item, count), (row, sequence, first, end) in zip(spans, wanted, strict=True):
        mine = items[first_item : first_item + count]
        assert (mine[:, :2] == (row, sequence)).all()
        assert (mine[:, 2] < mine[:, 3]).all()
        assert (mine[1:, 2] == mine[:-1, 3]).all()
        assert (mine[0, 2], mine[-1, 3]) == (first, end)


@given(
    sequences=SEQUENCES,
    window=st.none() | st.integers(1, 6000),
    threadgroups=st.sampled_from([1, 16, 512]),
    padding=st.sampled_from([0, 3]),
)
def test_items_with_positions_are_those_of_all_rows(
    sequences: list[tuple[int, int]], window: int | None, threadgroups: int, padding: int
) -> None:
    plan = KernelPlan(scheduled(sequences), BLOCK_SIZE, padding=padding)
    rows = plan.by_rows()
    assert rows is plan.by_rows()
    assert (rows is plan) == (not plan.chunks)
    assert (rows.chunks, rows.order, rows.padding) == ([], None, padding)
    assert np.array_equal(np.array(rows.slots), np.array(plan.slots))
    positions = [start + i for start, count in sequences for i in range(count)]
    assert rows.num_rows == len(positions)
    work = rows.work(window, Division(8, threadgroups), True)
    without = rows.work(window, Division(8, threadgroups))
    items = np.array(work.items)
    assert np.array_equal(items[:, :4], np.array(without.items))
    is_item = items[:, 2] < items[:, 3]
    assert (items[is_item, 4] == np.array(positions)[items[is_item, 0]]).all()
    assert not items[~is_item].any()


@given(steps=st.lists(SEQUENCES, min_size=1, max_size=6))
def test_tables_held_from_step_to_step_are_those_of_each(
    steps: list[list[tuple[int, int]]],
) -> None:
    tables = HeldTables()
    for number, step in enumerate(steps):
        sequences = scheduled(step)
        plan = KernelPlan(sequences, BLOCK_SIZE, 1, tables, padding=number)
        alone = KernelPlan(sequences, BLOCK_SIZE, padding=number)
        assert np.array_equal(np.array(plan.slots), np.array(alone.slots))
        short = [sequence for sequence in sequences if len(sequence.token_ids) < LONG_CHUNK]
        assert plan.tables.shape[0] == len(short)
        for row, sequence in zip(np.array(plan.tables), short, strict=True):
            assert tuple(row[: len(sequence.block_table)]) == sequence.block_table


def test_a_row_that_holds_a_table_already_is_not_written_again() -> None:
    tables, first, second = HeldTables(), tuple(range(9)), tuple(range(20, 24))
    assert tables.rows([first, second], 3).shape == (3, 16)
    again = tables.rows([first], 1)
    again[0, 0] = 77
    assert tables.rows([first, second], 2)[:, 0].tolist() == [77, 20]
    assert tables.rows([second, first], 2)[:, :4].tolist() == [[20, 21, 22, 23], [0, 1, 2, 3]]
    # A larger array replaces the old one.
    assert tables.rows([second, first], 5)[:, :4].tolist()[:2] == [[20, 21, 22, 23], [0, 1, 2, 3]]


@given(sequences=SEQUENCES)
def test_slots_and_order(sequences: list[tuple[int, int]]) -> None:
    plan = KernelPlan(scheduled(sequences), BLOCK_SIZE)
    positions = [
        i * 1000 * BLOCK_SIZE + position
        for i, (start, count) in enumerate(sequences)
        for position in range(start, start + count)
    ]
    assert np.array(plan.slots).tolist() == positions
    short = [i for i, (_, count) in enumerate(sequences) if count < LONG_CHUNK]
    long = [i for i, (_, count) in enumerate(sequences) if count >= LONG_CHUNK]
    rows = np.concatenate([np.full(count, i) for i, (_, count) in enumerate(sequences)])
    joined = np.concatenate([np.flatnonzero(rows == i) for i in short + long])
    order = np.arange(len(rows)) if plan.order is None else np.array(plan.order)
    assert joined[order].tolist() == list(range(len(rows)))
    assert [chunk.first for chunk in plan.chunks] == [int((rows < i).sum()) for i in long]


@given(sequences=SEQUENCES, padding=st.integers(1, 40))
def test_padding_is_written_nowhere_and_changes_nothing_else(
    sequences: list[tuple[int, int]], padding: int
) -> None:
    plan = KernelPlan(scheduled(sequences), BLOCK_SIZE)
    padded = KernelPlan(scheduled(sequences), BLOCK_SIZE, padding=padding)
    assert padded.padding == padding
    assert np.array(padded.slots).tolist() == [*np.array(plan.slots).tolist(), *[-1] * padding]
    assert (padded.order is None) == (plan.order is None)
    assert padded.num_rows == plan.num_rows
    work, wanted = padded.work(None, DIVISION), plan.work(None, DIVISION)
    assert np.array_equal(np.array(work.items), np.array(wanted.items))


@pytest.mark.parametrize(
    ("sequences", "num_items"),
    [
        ([(511, 1)] * 128, 128),  # enough rows: none is cut
        ([(511, 1)], 512 // MIN_SPAN),  # never finer than the least span
        ([(16383, 1)], 64),  # one long row keeps the device busy
        ([(8191, 1)] + [(127, 1)] * 63, 63 + 32),  # only the long one is cut
    ],
)
def test_rows_are_cut_by_their_share(sequences: list[tuple[int, int]], num_items: int) -> None:
    plan = KernelPlan(scheduled(sequences), BLOCK_SIZE)
    work = plan.work(None, DIVISION)
    items = np.array(work.items)
    assert (items[:, 2] < items[:, 3]).sum() == num_items
    assert (work.spans is None) == (num_items == len(sequences))


def test_work_is_made_once() -> None:
    plan = KernelPlan(scheduled([(100, 1)]), BLOCK_SIZE)
    assert plan.work(None, DIVISION) is plan.work(None, DIVISION)
    assert plan.work(None, DIVISION) is not plan.work(50, DIVISION)
