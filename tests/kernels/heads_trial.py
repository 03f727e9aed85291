"""Heads of a step's rows on a shim, against the operations of MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.heads import HeadInputs, HeadSettings
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.device.kernel_trial import largest_error
from tests.builders.kernel_cases import TOLERANCES
from tests.kernels.shim_language import ORDERS, KernelError, Shim

BLOCK_SIZE = 16
#: ``STARTS`` of the sequences that write a token each; one row more is padding.
STARTS = (5, 17, 0)
BASE = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCase:
    """One layer and one step.

    Attributes:
        heads: query heads.
        kv_heads: key/value heads.
        dim: size of a head.
        dtype: of products and pool.
        has_norms: whether queries and keys are normalised.
        has_frequencies: whether RoPE's frequencies are an array.
        is_merged: whether queries, keys and values are columns of one product.
    """

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: mx.Dtype = mx.float32
    has_norms: bool = True
    has_frequencies: bool = False
    is_merged: bool = True


def heads_are_right(shim: Shim, case: HeadCase) -> bool:
    """True if the case passes in every order of threads."""
    for order in ORDERS:
        shim.order = order
        try:
            error = heads_error(shim, case)
        except KernelError:
            return False
        if not error <= TOLERANCES[case.dtype]:
            return False
    return True


def heads_error(shim: Shim, case: HeadCase) -> float:
    """Return the largest error of queries, and of keys and values in the pool."""
    keys = iter(mx.random.split(mx.random.key(0), 4))
    widths = [heads * case.dim for heads in (case.heads, case.kv_heads, case.kv_heads)]
    rows = len(STARTS) + 1
    whole = mx.random.normal((rows, 1, sum(widths)), key=next(keys)).astype(case.dtype)
    ends = [widths[0], widths[0] + widths[1]]
    parts = [*mx.split(whole, ends, axis=-1)]
    weights = [
        mx.random.normal((case.dim,), key=next(keys)).astype(case.dtype)
        for _ in range(2 * case.has_norms)
    ]
    frequencies = mx.random.uniform(1, 50, (case.dim // 2,), key=next(keys))
    inputs = HeadInputs(
        products=[whole] * 3 if case.is_merged else [mx.contiguous(part) for part in parts],
        firsts=(0, ends[0], ends[1]) if case.is_merged else (0, 0, 0),
        positions=mx.array([*STARTS, 0], mx.int32),
        weights=weights,
        frequencies=frequencies if case.has_frequencies else None,
    )
    settings = HeadSettings(
        heads=case.heads,
        base=None if case.has_frequencies else BASE,
        epsilon=1e-5 if case.has_norms else None,
    )
    backend = KernelAttention(BLOCK_SIZE, shim)
    shape = LayerShape(
        num_kv_heads=case.kv_heads, key_dim=case.dim, value_dim=case.dim, dtype=case.dtype
    )
    pool = backend.new_pool(shape, 8)
    tables = [(7, 2), (6, 4), (5, 1)]
    plan = backend.padded_plan(
        [
            ScheduledSequence(seq_id=i, slot=i, start=start, token_ids=(1,), block_table=table)
            for i, (start, table) in enumerate(zip(STARTS, tables, strict=True))
        ],
        rows,
    )
    before = [mx.array(array) for array in backend.gather(pool, mx.array([[0, 3]]))]
    queries = backend.make_heads(pool, plan, settings, inputs)
    written = backend.gather(pool, mx.array(tables))
    after = backend.gather(pool, mx.array([[0, 3]]))
    places = mx.arange(len(STARTS)), mx.array(STARTS)
    actual = [queries[:, :, 0], *(array[places[0], :, places[1]] for array in written)]
    expected = _expected(case, settings, inputs, parts)
    assert all(mx.array_equal(*pair) for pair in zip(before, after, strict=True))
    return max(map(largest_error, actual, expected))


def _expected(
    case: HeadCase, settings: HeadSettings, inputs: HeadInputs, parts: Sequence[mx.array]
) -> list[mx.array]:
    """Return queries of all rows, and keys and values of those that are written."""
    made: list[mx.array] = []
    for index, part in enumerate(parts):
        array = part.reshape(len(part), 1, -1, case.dim)
        if index < len(inputs.weights):
            array = mx.fast.rms_norm(array, inputs.weights[index], settings.epsilon or 0.0)
        array = array.swapaxes(1, 2)
        if index < 2:
            array = mx.fast.rope(
                array.astype(mx.float32),
                case.dim,
                traditional=False,
                base=settings.base,
                scale=settings.scale,
                offset=inputs.positions,
                freqs=inputs.frequencies,
            )
        made.append(array[: None if index == 0 else len(STARTS), :, 0])
    return made
