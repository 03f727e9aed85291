"""Checks of biases by distance: each was wrong in some other server."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_parallm.worker.attention.base import AttentionBackend
from tests.builders.kernel_cases import Case, Trial

#: ``RAGGED``: lengths that are no multiple of 8, a long chunk, and rows alone.
RAGGED = ((42, 1), (0, 43), (0, 1), (17, 3))
DISTANCES = 11


def check_each_distance(backend: AttentionBackend, dtype: mx.Dtype) -> None:
    """Check that a bias goes to the keys at its distance, and is not multiplied by ``scale``.

    Queries are 0, so that the bias alone decides.
    """
    trial = Trial(Case(sequences=RAGGED, distances=DISTANCES, dtype=dtype))
    trial.queries = np.zeros_like(trial.queries)
    pool = trial.fill(backend)
    step = [(i, start, count) for i, (start, count) in enumerate(trial.case.sequences)]
    plan = trial._write(backend, pool, step)
    for distance in range(DISTANCES):
        bias = np.zeros((trial.case.heads, DISTANCES), np.float32)
        # A head of its own has none, so that heads differ.
        bias[1:, distance] = 6
        trial.bias = mx.array(bias)
        assert trial.error(trial.attend(backend, pool, plan)) <= trial.case.tolerance


def check_rows_one_by_one(backend: AttentionBackend) -> None:
    """Check that a text gets the same whole, in pieces, and token by token."""
    case = Case(sequences=((0, 43),), distances=DISTANCES)
    trial, alone = Trial(case), []
    whole = np.array(trial.run(backend, trial.fill(backend)))
    assert trial.error(mx.array(whole)) <= case.tolerance
    for size in (1, 5, 17):
        pool, pieces = trial.fill(backend), []
        for start in range(0, 43, size):
            count = min(size, 43 - start)
            plan = trial._write(backend, pool, [(0, start, count)])
            own = Trial(case)
            own.queries = trial.queries[start : start + count]
            pieces.append(np.array(own.attend(backend, pool, plan)))
        alone.append(np.concatenate(pieces))
    for each in alone:
        np.testing.assert_allclose(each, whole, rtol=1e-4, atol=1e-5)


def check_extremes(backend: AttentionBackend) -> None:
    """Check biases that all keys have, which change nothing, and one that rules a key out."""
    case = Case(sequences=((42, 1), (1, 42), (17, 3)), distances=DISTANCES)
    trial = Trial(case)
    pool = trial.fill(backend)
    step = [(i, start, count) for i, (start, count) in enumerate(case.sequences)]
    plan = trial._write(backend, pool, step)
    assert trial.bias is not None
    bias = np.array(trial.bias)
    bias[:, 0] = -1e9
    trial.bias = mx.array(bias)
    assert trial.error(trial.attend(backend, pool, plan)) <= case.tolerance
    for shift in (-300.0, 300.0):
        trial.bias = mx.full(bias.shape, shift)
        shifted = trial.attend(backend, pool, plan)
        trial.bias = mx.zeros(bias.shape)
        assert trial.error(shifted) <= 10 * case.tolerance
