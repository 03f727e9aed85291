"""The prefill kernel's text as C++: every chunk of a step, in every order of threads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.kernels.language import Tuning
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.chunk_plan import LONG_CHUNK
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.kernel_plan import KernelPlan
from mlx_parallm.worker.attention.kernel_prefill import PrefillKernels
from tests.builders.kernel_cases import Case, Trial
from tests.kernels.attention_trial import is_right
from tests.kernels.mutation import SYNCHRONISATION, leave_out
from tests.kernels.shim_compile import require_compiler
from tests.kernels.tensor_shim import TensorShim

pytestmark = pytest.mark.slow

BFLOAT: dict[str, Any] = {"dtype": mx.bfloat16}
CASES = (
    # A step has a chunk after many tokens, a decode row, a short chunk and a whole prompt.
    Case(sequences=((70, 20), (33, 1), (5, 3), (0, 17)), **BFLOAT),
    Case(sequences=((0, 70),), key_dim=32, dtype=mx.float16),
    # Head sizes are no multiple of what a lane takes, and differ between keys and values.
    Case(sequences=((9, 18),), key_dim=40, value_dim=16, **BFLOAT),
    # The rows of a token do not divide those of a threadgroup.
    Case(sequences=((3, 23),), heads=6, kv_heads=2, **BFLOAT),
    Case(sequences=((90, 16),), heads=2, kv_heads=2, window=21, sinks=True, **BFLOAT),
    Case(sequences=((300, 17), (2, 1), (0, 33)), sinks=True, **BFLOAT),
    Case(sequences=((300, 40),), window=200, **BFLOAT),
    Case(sequences=((20, 30),), soft_cap=2.0, block_size=8, **BFLOAT),
)


def scheduled(rows: Sequence[tuple[int, int]]) -> list[ScheduledSequence]:
    """Return sequences with (positions already computed, tokens of the step)."""
    return [
        ScheduledSequence(
            seq_id=i,
            slot=i,
            start=start,
            token_ids=(1,) * count,
            block_table=tuple(range(i * 100, i * 100 + -(-(start + count) // 16))),
        )
        for i, (start, count) in enumerate(rows)
    ]


def recording_shim() -> tuple[TensorShim, list[str]]:
    """Return a shim, and the list of names of the kernels that it makes."""
    shim, made = TensorShim(), []
    shim.mutate = lambda name, body: made.append(name) or body
    return shim, made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_are_right_in_every_order(case: Case) -> None:
    assert splits(case) == {0}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.sequences[0][0] > 64 and case.window != 21], ids=str
)
def test_keys_are_cut_and_their_parts_merged(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.worker.attention.key_spans.ITEM_KEYS", 0)
    monkeypatch.setattr("mlx_parallm.worker.attention.key_spans.MERGE_KEYS", 0)
    assert splits(case) == {1}


def splits(case: Case) -> set[int]:
    """Return ``SPLIT`` of the kernels that a case ran; fail if the result is wrong."""
    require_compiler()
    shim, split = TensorShim(), set()

    def look(name: str, body: str) -> str:
        if name.startswith("paged_prefill_"):
            split.add(int("#define SPLIT 1" in body))
        return body

    shim.mutate = look
    with pytest.MonkeyPatch.context() as patch:
        # It would compile both kernels.
        patch.setattr(PrefillKernels, "prepare", lambda *_: None)
        assert is_right(shim, case)
    return split


@pytest.mark.parametrize("window", [None, 600])
def test_kernels_of_a_kind_are_all_made_at_its_first_step(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that later steps compile nothing: it takes seconds, in which streams would wait."""
    require_compiler()
    shim, made = recording_shim()
    backend = KernelAttention(16, shim)
    first = Trial(Case(sequences=((2, 1),), window=window, **BFLOAT))
    mx.eval(first.run(backend, first.fill(backend)))
    names = {"paged_write", "paged_decode", "paged_merge", "paged_prefill"}
    assert {name.rpartition("_")[0] for name in made} == names
    before = list(made)
    monkeypatch.setattr("mlx_parallm.worker.attention.key_spans.ITEM_KEYS", 0)
    monkeypatch.setattr("mlx_parallm.worker.attention.key_spans.MERGE_KEYS", 0)
    for sequences in (((70, 1), (0, 17)), ((130, 18),)):
        trial = Trial(Case(sequences=sequences, window=window, **BFLOAT))
        error = trial.error(trial.run(backend, trial.fill(backend)))
        assert error <= trial.case.tolerance
    assert made == before


class PaddedAttention(KernelAttention):
    """A backend whose plans have seven rows of padding, filled with NaN."""

    def plan(self, sequences: Sequence[ScheduledSequence]) -> KernelPlan:
        return self.padded_plan(
            sequences, 7 + sum(len(sequence.token_ids) for sequence in sequences)
        )

    def write(self, pool: LayerPool, plan: Any, keys: mx.array, values: mx.array) -> None:
        super().write(pool, plan, more(keys), more(values))

    def attend(self, pool: LayerPool, plan: Any, queries: mx.array, **options: Any) -> mx.array:
        output = super().attend(pool, plan, more(queries), **options)
        assert not output[-7:].any()
        return output[:-7]


def more(rows: mx.array) -> mx.array:
    return mx.concatenate([rows, mx.full((7, *rows.shape[1:]), mx.nan, rows.dtype)])


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_padding_changes_nothing(case: Case) -> None:
    require_compiler()
    trial = Trial(case)
    padded = PaddedAttention(case.block_size, TensorShim())
    plain = KernelAttention(case.block_size, TensorShim())
    actual = trial.run(padded, trial.fill(padded, poison=True))
    assert mx.array_equal(actual, trial.run(plain, trial.fill(plain, poison=True)))


@pytest.mark.parametrize("window", [None, 30])
def test_large_chunks_are_padded_for_stock_attention(window: int | None) -> None:
    require_compiler()
    shim = TensorShim()
    shim.tuning = Tuning(threadgroups=16, chunk_multiple=64)
    sequences = ((0, 20), (70, 40), (130, 16), (9, 1))
    case = Case(sequences=sequences, window=window, **BFLOAT)
    assert is_right(shim, case, large_work=1000)
    plan = KernelPlan(scheduled(sequences), 16, shim.tuning.chunk_multiple, large_work=1000)
    assert [chunk.start for chunk in plan.chunks] == [0, 70, 130]
    assert [(chunk.begin, chunk.num_rows) for chunk in plan.chunks] == [
        (0, 64),
        (64, 64),
        (128, 64),
    ]


@pytest.mark.parametrize("block_size", [5, 16, 1024])
def test_what_large_chunks_attend_by_is_made_ready(block_size: int) -> None:
    require_compiler()
    shim, used = recording_shim()
    shim.tuning = Tuning(threadgroups=16, chunk_multiple=64)
    backend = KernelAttention(block_size, shim)
    shape = LayerShape(num_kv_heads=2, key_dim=16, value_dim=32, dtype=mx.bfloat16)
    backend.prepare(shape, heads=4)
    assert [name.rpartition("_")[0] for name in used] == ["paged_gather"]


@pytest.mark.parametrize("nth", range(5))
def test_no_barrier_or_shuffle_can_be_left_out(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    # An item has several tiles.
    monkeypatch.setattr("mlx_parallm.worker.attention.kernel_prefill.THREADGROUPS", 2)
    shim = TensorShim()
    mutated = leave_out(shim, "paged_prefill_", nth, ".cu")
    assert not is_right(shim, Case(sequences=((150, 20),), **BFLOAT))
    assert {len(re.findall(SYNCHRONISATION[".cu"], body)) for body in mutated} == {5}


@pytest.mark.parametrize(
    "mistake",
    [
        ("await_fetches<0>();", ""),
        ("await_fetches<1>();", ""),
        ("await_fetches<1>();", "await_fetches<2>();"),
        ("} else {\nclose_fetches();", "} else {"),
        ("min(tile + i, end - 1)", "tile + i"),
        ("part * 8 < size", "true"),
        ("tile + KEYS > all_to", "false"),
        ("tile < all_from", "false"),
    ],
    ids=str,
)
def test_no_wait_or_mask_can_be_left_out(mistake: tuple[str, str]) -> None:
    require_compiler()
    shim = TensorShim()

    def mutate(name: str, body: str) -> str:
        if not name.startswith("paged_prefill_"):
            return body
        assert mistake[0] in body
        return body.replace(*mistake)

    shim.mutate = mutate
    case = Case(sequences=((150, 20),), window=70, key_dim=40, value_dim=48, **BFLOAT)
    assert not is_right(shim, case)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([1, LONG_CHUNK, 17, 100])),
        min_size=1,
        max_size=6,
    ).filter(lambda rows: any(count >= LONG_CHUNK for _, count in rows)),
    st.integers(1, 64),
    st.none() | st.integers(1, 200),
    st.sampled_from([1, 8, 40]),
)
def test_items_are_the_rows_of_the_chunks(
    rows: list[tuple[int, int]], tokens: int, window: int | None, threadgroups: int
) -> None:
    sequences = scheduled(rows)
    long = [sequence for sequence in sequences if len(sequence.token_ids) >= LONG_CHUNK]
    work = KernelPlan(sequences, 16).chunk_work(tokens, len(long), window, threadgroups)
    items = np.array(work.items)
    assert (items[:, 1] <= tokens).all()
    keys: dict[tuple[int, int, int], list[int]] = {}
    parts = []
    for row, count, position, table, begin, end, part, stride in items.tolist():
        assert begin < end <= position + count
        for i in range(count):
            keys.setdefault((row + i, position + i, table), []).extend(range(begin, end))
            parts.append(part + i * stride)
    assert sorted(parts) == list(range(work.num_parts))
    first, wanted = 0, []
    for sequence in sequences:
        if sequence in long:
            wanted += [
                (first + i, sequence.start + i, long.index(sequence))
                for i in range(len(sequence.token_ids))
            ]
        first += len(sequence.token_ids)
    assert sorted(keys, key=lambda row: (row[2], row[0])) == wanted
    assert work.num_rows == len(wanted)
    for (_, position, _), seen in keys.items():
        assert sorted(seen) == list(range(min(seen), max(seen) + 1)), "cut without gap or overlap"
        assert max(seen) >= position
        assert min(seen) <= (0 if window is None else max(position - window + 1, 0))
    if work.spans is not None:
        spans = np.array(work.spans)
        assert (spans[1:, 0] == spans[:-1].sum(axis=1)).all()
        assert spans.sum(axis=0)[1] == work.num_parts
    else:
        assert work.num_parts == work.num_rows
    for sequence, table in zip(long, np.array(work.tables).tolist(), strict=True):
        assert tuple(table[: len(sequence.block_table)]) == sequence.block_table
