"""Attention layers whose queries, keys and values one kernel makes of their products.

mlx_lm's layers run up to eight operations between the products of queries, keys and values and
their attention. Each costs the host some microseconds, and the device a launch
(``docs/decisions/053-fewer-kernels-a-layer.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.heads import HeadInputs, HeadSettings
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.device.kernel_trial import KernelTrials, largest_error, why_off
from mlx_parallm.worker.layers.packing import WORD_BITS, packing_of
from mlx_parallm.worker.layers.row_layers import Columns, called_part
from mlx_parallm.worker.layers.wrapped_calls import class_of

#: ``LAYERS``: mlx_lm's attention layers of this form, by module and class name.
LAYERS = frozenset(
    {
        ("mlx_lm.models.llama", "Attention"),
        ("mlx_lm.models.qwen2", "Attention"),
        ("mlx_lm.models.qwen3", "Attention"),
        ("mlx_lm.models.qwen3_moe", "Attention"),
    }
)
# MAX_ERROR is in parts of the largest value: a rounding or two of 16-bit numbers.
MAX_ERROR = 0.01
# BLOCK_SIZE and STARTS of the sequences that the trial writes.
BLOCK_SIZE = 16
STARTS = (0, 17, 30)
DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def use_head_kernels(
    model: nn.Module, language: KernelLanguage, trials: KernelTrials | None = None
) -> int:
    """Mark a model's attention layers for which the kernel is right; return how many are.

    They use it only in packed forwards of this package, see ``attention_overrides``.
    """
    trial = (trials or KernelTrials()).of("the kernel of attention heads is")
    backend = KernelAttention(BLOCK_SIZE, language)
    marked = 0
    for layer in model.modules():
        kind = class_of(layer)
        settings = settings_of(layer) if kind in LAYERS else None
        if settings is None:
            continue
        arrays = cast("list[tuple[str, mx.array]]", tree_flatten(layer.parameters()))
        packings = tuple(packing_of(layer[name]) for name in ("q_proj", "k_proj", "v_proj"))
        dtypes = tuple(str(array.dtype) for _, array in arrays)
        shape = _shape(layer), _width(layer), settings, packings, dtypes
        if trial.agree(shape, partial(why_not, backend, layer)):
            layer["_makes_heads"] = True
            marked += 1
    return marked


def settings_of(layer: Any) -> HeadSettings | None:
    """Return how a layer makes heads; None if the kernel cannot."""
    rope = layer.rope
    if type(rope) not in (nn.RoPE, Llama3RoPE) or rope.traditional:
        return None
    widths = {layer[name].weight.shape[0] for name in ("k_proj", "v_proj")}
    if widths != {layer.n_kv_heads * rope.dims}:
        return None
    epsilons = {norm.eps for norm in _norms(layer)}
    if len(epsilons) > 1 or any(type(norm) is not nn.RMSNorm for norm in _norms(layer)):
        return None
    is_plain = type(rope) is nn.RoPE
    return HeadSettings(
        heads=layer.n_heads,
        base=rope.base if is_plain else None,
        scale=rope.scale if is_plain else 1.0,
        epsilon=min(epsilons, default=None),
    )


def columns_of(layer: Any, x: mx.array) -> list[Columns]:
    """Return the queries, keys and values of rows ``x``, ``[T, 1, hidden]``."""
    return [called_part(module, x).columns for module in (layer.q_proj, layer.k_proj, layer.v_proj)]


def inputs_of(layer: Any, columns: Sequence[Columns], positions: mx.array) -> HeadInputs:
    """Return what a layer's heads are made of: columns of queries, keys and values."""
    first, second, third = (part.first for part in columns)
    return HeadInputs(
        products=[part.matrix for part in columns],
        firsts=(first, second, third),
        positions=positions,
        weights=[norm.weight for norm in _norms(layer)],
        frequencies=layer.rope.get("_freqs"),
    )


def why_not(backend: KernelAttention, layer: Any) -> str | None:
    """Return why the kernel is not to be used for a layer; None if it agrees with mlx_lm's."""
    return why_off(lambda: heads_error(backend, layer), MAX_ERROR)


def heads_error(backend: KernelAttention, layer: Any) -> float:
    """Return the largest difference from mlx_lm's operations, in parts of the largest value."""
    shape, settings = _shape(layer), settings_of(layer)
    tables = [(2 * i, 2 * i + 1) for i in range(len(STARTS))]
    pool = backend.new_pool(shape, 2 * len(tables))
    if settings is None or not backend.makes_heads(pool, shape.dtype):
        return float("inf")
    sequences = [
        ScheduledSequence(seq_id=i, slot=i, start=start, token_ids=(0,), block_table=table)
        for i, (start, table) in enumerate(zip(STARTS, tables, strict=True))
    ]
    x = mx.random.normal((len(STARTS), 1, _width(layer)), key=mx.random.key(0)).astype(shape.dtype)
    positions = mx.array(STARTS, mx.int32)
    queries = backend.make_heads(
        pool, backend.plan(sequences), settings, inputs_of(layer, columns_of(layer, x), positions)
    )
    keys, values = backend.gather(pool, mx.array(tables))
    rows = mx.arange(len(STARTS))
    written = keys[rows, :, positions], values[rows, :, positions]
    actual = [queries[:, :, 0], *written]
    return max(map(largest_error, actual, _stock_heads(layer, x, positions)))


def _stock_heads(layer: Any, x: mx.array, positions: mx.array) -> Iterator[mx.array]:
    """Yield the queries, keys and values that mlx_lm's operations make, ``[T, heads, D]``."""
    norms = dict(zip(("q", "k"), _norms(layer), strict=False))
    for name, heads in (("q", layer.n_heads), ("k", layer.n_kv_heads), ("v", layer.n_kv_heads)):
        made = layer[f"{name}_proj"](x).reshape(len(x), 1, heads, -1)
        if name in norms:
            made = norms[name](made)
        made = made.swapaxes(1, 2)
        yield (made if name == "v" else layer.rope(made, offset=positions))[:, :, 0]


def _norms(layer: Any) -> list[Any]:
    return [layer.q_norm, layer.k_norm] if "q_norm" in layer else []


def _width(layer: Any) -> int:
    """Return the width of a layer's input."""
    projection = layer.q_proj
    packing = packing_of(projection)
    words = projection.weight.shape[1]
    return words if packing is None else words * WORD_BITS // packing.bits


def _shape(layer: Any) -> LayerShape:
    size, projection = layer.rope.dims, layer.k_proj
    dtype = projection.get("scales", projection.weight).dtype
    # The scales of some formats are no numbers of 16 bits; what is computed from them is.
    dtype = dtype if dtype in DTYPES else mx.bfloat16
    return LayerShape(num_kv_heads=layer.n_kv_heads, key_dim=size, value_dim=size, dtype=dtype)
