"""The references of the checks at load need no GPU kernels that MLX compiles only for them."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.lora.adapter_check import INNER, NUM_ADAPTERS, _expected, _stack
from mlx_parallm.worker.sampling import check as sampling_check
from mlx_parallm.worker.sampling.logprobs import target_logprobs
from mlx_parallm.worker.sampling.truncation import truncate

VOCAB = 128
#: Operations that pick rows by an array or put them back: MLX's CUDA backend compiles each.
COMPILED = {"Gather", "Scatter"}


def specs_of_rows() -> list[SampleSpec]:
    kinds = len(sampling_check._SPREADS) + len(sampling_check._MOST)
    return [
        SampleSpec(params=params, seed=row, position=7, prompt_ids=(), output_ids=())
        for row, params in enumerate(sampling_check._PARAMS * kinds)
    ]


def operations(array: mx.array, folder: Path) -> set[str]:
    """Return the names of the operations that an array is computed by."""
    file = folder / "graph.dot"
    mx.export_to_dot(str(file), array)
    return set(re.findall(r'label ?="(\w+)', file.read_text()))


def test_rows_are_truncated_without_picking_them(tmp_path: Path) -> None:
    scaled, specs = sampling_check.check_logits(VOCAB, mx.float32), specs_of_rows()
    mx.eval(scaled)
    at_once = truncate(scaled, [spec.params for spec in specs]) > -mx.inf
    assert operations(at_once, tmp_path) >= COMPILED
    kept = sampling_check._kept(scaled, specs, 1.0)
    used = operations(kept, tmp_path)
    assert "Sort" in used
    assert COMPILED.isdisjoint(used)
    assert mx.array_equal(kept, at_once)


def test_logprobs_are_those_of_stock_operations() -> None:
    logits = sampling_check.check_logits(VOCAB, mx.float32)
    ids = np.arange(logits.shape[0]) * 3 % VOCAB
    stock = target_logprobs(logits, mx.array(ids), 0).target
    actual = sampling_check._logprobs(np.array(logits), ids[:, None])[:, 0]
    assert np.allclose(actual, np.array(stock), atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_changes_are_those_of_stock_operations(dtype: mx.Dtype) -> None:
    stack, owners = _stack(24, 8, dtype), np.arange(9) % (NUM_ADAPTERS + 1)
    x, y = (mx.random.normal((9, 1, size), dtype, key=mx.random.key(size)) for size in (INNER, 24))
    a, b = (array.astype(mx.float32)[mx.array(owners)] for array in (stack.a, stack.b))
    stock = y.astype(mx.float32) + (x.astype(mx.float32) @ a.swapaxes(-1, -2)) @ b
    assert mx.allclose(_expected(x, y, stack, owners), stock, atol=1e-4)
