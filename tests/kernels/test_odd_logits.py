"""The sampling kernels' texts choose what stock MLX does from rows with NaN and infinity."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels
from mlx_parallm.worker.sampling.sampler import Sampler
from tests.kernels.sampling_trial import (
    DTYPES,
    THREADS,
    TRUNCATIONS,
    VOCAB,
    drawn,
    spec,
    tokens_of,
    trusted,
    values_of,
)
from tests.kernels.shim_language import ORDERS, Shim

pytestmark = pytest.mark.slow


def odd_rows(vocab: int) -> np.ndarray:
    """Return rows with NaN or infinity, whose largest number is at 40, float32 ``[n, vocab]``."""
    numbers = np.random.default_rng(3).normal(size=vocab).astype(np.float32)
    numbers[40] = 40.0
    half = (vocab + 1) // 2
    rows = [np.full(vocab, value, np.float32) for value in (math.nan, -math.nan, -np.inf, np.inf)]
    # Tokens i and half + i belong to one thread of ``draw``; the second NaN may come first there.
    for places in (
        (0,),
        (30,),
        (vocab - 1,),
        (half + 1, 2),
        (30, half),
        (half - 1, half, vocab - 2),
    ):
        for value in (math.nan, -math.nan, np.inf):
            rows.append(numbers.copy())
            rows[-1][list(places)] = value
    for first, second in ((30, 50), (50, 30)):
        rows.append(numbers.copy())
        rows[-1][[first, second]] = np.inf, math.nan
    rows.append(np.where(np.arange(vocab) == 77, math.nan, -np.inf).astype(np.float32))
    return np.array(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "threads"), [(111, 32), (600, 64), (2048, 128)])
def test_a_greedy_row_with_nan_or_infinity_has_the_token_of_stock_operations(
    shim: Shim, vocab: int, threads: int, dtype: mx.Dtype
) -> None:
    logits = mx.array(odd_rows(vocab)).astype(dtype)
    greedy = [spec(i, temperature=0.0) for i in range(len(logits))]
    expected = Sampler()(logits, greedy).tokens.tolist()
    assert expected == odd_rows(vocab).argmax(axis=-1).tolist()
    kernels = SamplingKernels(shim, threads=threads)
    for shim.order in ORDERS:
        assert kernels.greedy(logits).tolist() == expected
        assert drawn(kernels, logits, greedy)[0] == expected


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
def test_a_drawn_row_with_nan_or_infinity_has_its_first_largest_token(
    shim: Shim, options: dict[str, Any]
) -> None:
    rows = odd_rows(VOCAB)
    logits, specs = mx.array(rows), [spec(i, temperature=0.7, **options) for i in range(len(rows))]
    expected = rows.argmax(axis=-1).tolist()
    assert drawn(SamplingKernels(shim, threads=THREADS), logits, specs)[0] == expected
    if not options:
        assert Sampler()(logits, specs).tokens.tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probabilities_of_rows_with_nan_are_those_of_stock_operations(
    shim: Shim, temperature: float
) -> None:
    logits = mx.array(odd_rows(VOCAB))
    specs = [spec(i, temperature=temperature, logprobs=2) for i in range(len(logits))]
    actual = Sampler(trusted(shim, mx.float32))(logits, specs)
    wanted = Sampler()(logits, specs)
    assert tokens_of(actual, len(specs)) == tokens_of(wanted, len(specs))
    for some, others in zip(
        values_of(actual, len(specs)), values_of(wanted, len(specs)), strict=True
    ):
        assert some == pytest.approx(others, nan_ok=True)
