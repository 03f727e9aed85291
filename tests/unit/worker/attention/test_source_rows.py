"""Rows of cross-attention: decode rows at the last position of a source, which many may share."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.step import ScheduledSequence, SourceTable
from mlx_parallm.worker.attention import decode_groups, dense
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.source_rows import SourceRows
from tests.builders.kernel_cases import Case, Trial
from tests.builders.source_cases import ROWS, SOURCES, source_cases
from tests.compiled_attention import CompiledAttention
from tests.unit.worker.attention.test_cases import reference


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("case", source_cases(), ids=str)
def test_rows_see_their_whole_source(
    case: Case, composed: bool, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "is_exp_slow", lambda: composed)
    monkeypatch.setattr(decode_groups, "MIN_SAVED_TOKENS", 16 if shares else 1 << 20)
    trial, backend = Trial(case), reference(case)
    pool = trial.fill(backend)
    trial.run(backend, pool)
    before = [np.array(array.astype(mx.float32)) for array in pool.arrays()]
    plan = backend.plan(trial.source_rows(ROWS))
    output = trial.attend(backend, pool, plan, len(ROWS))
    assert trial.source_error(output, ROWS) <= case.tolerance
    for array, kept in zip(pool.arrays(), before, strict=True):
        assert np.array_equal(np.array(array.astype(mx.float32)), kept)


def test_a_row_of_another_source_shows() -> None:
    trial = Trial(source_cases()[0])
    backend = reference(trial.case)
    pool = trial.fill(backend)
    trial.run(backend, pool)
    output = trial.attend(backend, pool, backend.plan(trial.source_rows(ROWS)), len(ROWS))
    assert trial.source_error(output, (*ROWS[1:], ROWS[0])) > 0.1


def test_a_source_without_its_last_token_shows() -> None:
    trial = Trial(source_cases()[0])
    backend = reference(trial.case)
    pool = trial.fill(backend)
    trial.run(backend, pool)
    rows = [replace(row, start=max(row.start - 1, 0)) for row in trial.source_rows(ROWS)]
    output = trial.attend(backend, pool, backend.plan(rows), len(ROWS))
    assert trial.source_error(output, ROWS) > 0.01


@pytest.mark.parametrize("distances", [None, 7])
def test_compiled_rows_are_those_of_a_plan(distances: int | None) -> None:
    trial = Trial(Case(sequences=SOURCES, distances=distances))
    backend = CompiledAttention(16)
    pool = trial.fill(backend)
    trial.run(backend, pool)
    rows = trial.source_rows(ROWS)
    positions = np.array([row.start for row in rows], dtype=np.int32)
    arrays = [mx.array(array) for array in backend.decode_arrays(rows, positions, "rows")]
    plan = backend.decode_plan(arrays, "rows")
    output = trial.attend(backend, pool, plan, len(ROWS))
    assert trial.source_error(output, ROWS) <= trial.case.tolerance
    stock = ReferenceAttention.attend
    wanted = stock(
        backend,
        pool,
        backend.plan(rows),
        mx.array(trial.queries[: len(ROWS)].astype(np.float32))[:, :, None],
        scale=trial.case.scale,
        window=None,
        sinks=None,
        distance_bias=trial.bias,
    )
    assert mx.allclose(output, wanted, rtol=1e-5, atol=1e-5).item()


def test_rows_that_take_turns_are_planned_once() -> None:
    rows = SourceRows(ReferenceAttention(16))
    sources = [SourceTable(block_table=(i,), num_tokens=5 + i) for i in range(4)]
    row = ScheduledSequence(seq_id=0, slot=0, start=3, token_ids=(1,), block_table=(9,))
    every = [replace(row, source=source) for source in sources]
    planned = [rows.plan(every), rows.plan(every[:3]), rows.plan(every), rows.plan(every[:3])]
    assert planned[0] is planned[2] is not planned[1]
    assert planned[1] is planned[3]
    assert rows.plan(every[1:]) is not planned[0]
    # The oldest is dropped.
    assert rows.plan(every) is not planned[0]
