"""Replacements for attention modules of mlx_lm that multiply queries and keys themselves.

Most models call ``scaled_dot_product_attention``, which ``seam.py`` replaces. A module that
multiplies queries and keys itself would need dense caches of each group of rows (path "split").
With an entry here it runs packed: while a packed forward is in progress, the function named here
runs in place of the module's ``__call__``.

A function takes the forward in progress, the module, and the module's own arguments. It returns
what the module would return. If the cache does not belong to the forward, it returns None, and the
module's own code runs. The self-check at load compares the whole model with mlx_lm: if an entry is
wrong, the packed path is refused, and the next path runs the module's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.worker.generation.paged_cache import PackedStep, PagedLayerCache
from mlx_parallm.worker.layers.attention_heads import LAYERS, columns_of, inputs_of, settings_of
from mlx_parallm.worker.layers.block_kernels import BLOCKS, MLPS, run_block, run_mlp
from mlx_parallm.worker.layers.fused_blocks import fused_block
from mlx_parallm.worker.layers.row_layers import Columns

Override = Callable[..., mx.array | None]


def soft_capped_attention(
    step: PackedStep, module: Any, x: mx.array, mask: Any = None, cache: Any = None
) -> mx.array | None:
    """Return the output of gemma2's attention, whose scores become ``cap * tanh(score / cap)``.

    Args:
        step: the forward in progress.
        module: ``mlx_lm.models.gemma2.Attention``.
        x: hidden states of the rows, ``[T, 1, hidden]``.
        mask: the mask that the forward's caches made for the model, or None.
        cache: the layer's cache.

    Returns:
        ``[T, 1, hidden]``, or None if the cache does not belong to a packed forward.
    """
    if not isinstance(cache, PagedLayerCache):
        return None
    rows = x.shape[0]
    queries, keys, values = (
        project(x).reshape(rows, 1, heads, -1).swapaxes(1, 2)
        for project, heads in (
            (module.q_proj, module.n_heads),
            (module.k_proj, module.n_kv_heads),
            (module.v_proj, module.n_kv_heads),
        )
    )
    queries = module.rope(queries, offset=cache.offset)
    pool, _ = cache.update_and_fetch(module.rope(keys, offset=cache.offset), values)
    output = step.attend(
        queries,
        pool,
        scale=module.scale,
        mask=mask,
        sinks=None,
        soft_cap=module.attn_logit_softcapping,
    )
    assert output is not None, "the cache has made its pool known to the step"
    return module.o_proj(output.swapaxes(1, 2).reshape(rows, 1, -1))


def attention_of_made_heads(
    step: PackedStep, module: Any, x: mx.array, mask: Any = None, cache: Any = None
) -> mx.array | None:
    """Return the output of a layer whose heads one kernel makes; arguments are as above.

    None if the layer, the backend or the cache is not made for it.
    """
    if "_makes_heads" not in module or module.training:
        return None
    if not isinstance(cache, PagedLayerCache) or not cache.makes_heads(x.dtype):
        return None
    columns = columns_of(module, x)
    if any(part.matrix.dtype != x.dtype for part in columns):
        # Scales of another dtype than x: the kernel reads products as numbers of the pool's.
        return None
    attended = _attended(step, module, columns, mask, cache)
    return module.o_proj(attended.reshape(len(x), 1, -1))


def _attended(
    step: PackedStep, module: Any, columns: Sequence[Columns], mask: Any, cache: PagedLayerCache
) -> mx.array:
    """Return what the heads of a marked layer attend to, ``[T, heads, 1, D]``."""
    settings = settings_of(module)
    assert settings is not None, "the layer was marked"
    queries = cache.make_heads(settings, inputs_of(module, columns, cache.offset))
    output = step.attend(queries, cache.keys, scale=module.scale, mask=mask, sinks=None)
    assert output is not None, "the cache has made its pool known to the step"
    return output


def block_of_kernels(
    step: PackedStep, module: Any, x: mx.array, mask: Any = None, cache: Any = None
) -> mx.array | None:
    """Return a block's output, whose residuals and norms are one kernel; None without kernels.

    Products of packed weights compute what is between them for one row. For more rows, they compute
    SwiGLU, and leave sums of parts to the kernel of residuals.
    """
    if "_kernels" not in module or module.training or not isinstance(cache, PagedLayerCache):
        return None
    before, step.residual = step.residual, None
    if before is not None and before.total is not x:
        before = None
    fused = fused_block(module, x) if cache.makes_heads(x.dtype) else None
    attention = module.self_attn

    def attended(columns: Sequence[Columns]) -> mx.array:
        return _attended(step, attention, columns, mask, cache)

    if fused is None:
        step.residual = run_block(
            module, x, lambda rows: attention(rows, mask, cache), module.mlp, before
        )
    elif len(x) == 1:
        columns, counts = fused.columns(x)
        return fused.after_attention(attended(columns), x, counts)
    else:
        step.residual = run_block(
            module,
            x,
            lambda rows: fused.output.parts(
                attended(columns_of(attention, rows)).reshape(len(rows), 1, -1)
            ),
            fused.mlp,
            before,
        )
    return step.residual.total


def mlp_of_kernels(_step: PackedStep, module: Any, x: mx.array) -> mx.array | None:
    """Return an MLP's output, whose SwiGLU is one kernel; None without kernels or rows."""
    if "_kernels" not in module or module.training or x.ndim != 3 or x.shape[1] != 1:
        return None
    return run_mlp(module, x)


#: The replacements, by module and class name of mlx_lm.
ATTENTION_OVERRIDES: Mapping[tuple[str, str], Override] = {
    ("mlx_lm.models.gemma2", "Attention"): soft_capped_attention,
    **dict.fromkeys(LAYERS, attention_of_made_heads),
    **dict.fromkeys(BLOCKS, block_of_kernels),
    **dict.fromkeys(MLPS, mlp_of_kernels),
}
