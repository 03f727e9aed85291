"""Rows of cross-attention and biases by distance in kernels, by plans and by compiled plans."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.worker.attention.base import LayerPool
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from tests.builders.bias_checks import check_each_distance, check_extremes, check_rows_one_by_one
from tests.builders.kernel_cases import Case, Trial
from tests.builders.source_cases import ROWS, SOURCES, source_cases
from tests.kernels.shim_language import ORDERS, Shim

pytestmark = pytest.mark.slow


def decode_plan(trial: Trial, backend: KernelAttention, pool: LayerPool, rows: list[int]) -> Any:
    """Return the plan of a compiled step, after a step that shows what layers ask of it."""
    sequences = trial.source_rows(rows)
    plan = backend.plan(sequences)
    mx.eval(trial.attend(backend, pool, plan, len(rows)))
    kinds = backend.decode_kinds(plan)
    positions = np.array([row.start for row in sequences], dtype=np.int32)
    arrays = [mx.array(array) for array in backend.decode_arrays(sequences, positions, kinds)]
    return backend.decode_plan(arrays, kinds)


@pytest.mark.parametrize("case", source_cases(), ids=str)
def test_rows_see_their_whole_source(shim: Shim, case: Case) -> None:
    trial = Trial(case)
    backend = KernelAttention(case.block_size, shim, quantisation=case.quantisation)
    pool = trial.fill(backend, poison=True)
    mx.eval(trial.run(backend, pool))
    for order in ORDERS:
        shim.order = order
        plan = backend.plan(trial.source_rows(ROWS))
        output = trial.attend(backend, pool, plan, len(ROWS))
        assert trial.source_error(output, ROWS) <= case.tolerance
    output = trial.attend(backend, pool, decode_plan(trial, backend, pool, [*ROWS]), len(ROWS))
    assert trial.source_error(output, ROWS) <= case.tolerance


@pytest.mark.parametrize("rows", [[0], [5], [5, 1]], ids=str)
def test_a_bias_is_added_in_compiled_steps(shim: Shim, rows: list[int]) -> None:
    """One row is cut into items, of which only the last ends at the row's position."""
    trial = Trial(Case(sequences=SOURCES, distances=40, heads=6))
    backend = KernelAttention(16, shim)
    pool = trial.fill(backend, poison=True)
    mx.eval(trial.run(backend, pool))
    plan = decode_plan(trial, backend, pool, rows)
    assert [kind[-1] for kind in plan.works] == [True]
    assert any(work.spans is not None for work in plan.works.values()) == (5 in rows)
    output = trial.attend(backend, pool, plan, len(rows))
    assert trial.source_error(output, rows) <= trial.case.tolerance


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_each_distance_has_its_bias(shim: Shim, dtype: mx.Dtype) -> None:
    check_each_distance(KernelAttention(16, shim), dtype)


def test_pieces_of_a_text_give_what_it_gives_whole(shim: Shim) -> None:
    check_rows_one_by_one(KernelAttention(16, shim))


def test_extreme_biases_are_right(shim: Shim) -> None:
    check_extremes(KernelAttention(16, shim))


def test_layers_with_and_without_bias_share_a_plan(shim: Shim) -> None:
    trial = Trial(Case(sequences=((130, 1), (3, 1), (20, 18)), distances=40))
    backend = KernelAttention(16, shim)
    pool = trial.fill(backend, poison=True)
    sequences = [(i, start, count) for i, (start, count) in enumerate(trial.case.sequences)]
    plan, bias = trial._write(backend, pool, sequences), trial.bias
    for table in (bias, None, bias):
        trial.bias = table
        assert trial.error(trial.attend(backend, pool, plan)) <= trial.case.tolerance
    assert {kind[-1] for kind in backend.decode_kinds(plan)} == {False}
    assert {kind[-1] for kind in backend.decode_kinds(plan.by_rows())} == {True}
