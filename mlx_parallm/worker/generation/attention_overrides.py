"""Attention modules of mlx_lm that compute attention by hand, and what runs in their place.

Most models call ``scaled_dot_product_attention``, which ``seam.py`` replaces. A module that
multiplies queries and keys itself would have to see dense caches of each group of rows (path
"split"). With an entry here it runs packed: while a packed forward is in progress, its ``__call__``
is the function named here.

A function takes the forward in progress, the module, and the module's own arguments. It returns
what the module would, or None to have the module's own code run: when the cache is none of the
forward's. The self-check at load compares the whole model with mlx_lm; if an entry is wrong, the
packed path is refused and the module's own code runs on the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from mlx_parallm.worker.generation.paged_cache import PackedStep, PagedLayerCache

Override = Callable[..., mx.array | None]


def soft_capped_attention(
    step: PackedStep, module: Any, x: mx.array, mask: Any = None, cache: Any = None
) -> mx.array | None:
    """gemma2's attention, whose scores pass through ``cap * tanh(score / cap)``.

    Args:
        step: the forward in progress.
        module: ``mlx_lm.models.gemma2.Attention``.
        x: hidden states of the rows, ``[T, 1, hidden]``.
        mask: None, or what the forward's caches gave the model.
        cache: the layer's.

    Returns:
        ``[T, 1, hidden]``, or None for a cache that is not of a packed forward.
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


#: By module and class of mlx_lm.
ATTENTION_OVERRIDES: Mapping[tuple[str, str], Override] = {
    ("mlx_lm.models.gemma2", "Attention"): soft_capped_attention,
}
