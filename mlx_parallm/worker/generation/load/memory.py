"""The memory that a model could use: the size and number of its KV blocks, and its scores."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.models.checkpoints.decoder_sizes import (
    DEFAULT_MAX_MODEL_LEN,
    context_length,
    query_heads,
)
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.step import KVPlan
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.attention.dense import SCORE_BYTES, is_fused
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.generation.cache_layout import (
    CacheLayout,
    OpaqueLayout,
    kv_shapes,
    leaves,
    state_layouts,
)

# A model without KV still has block tables. NOMINAL_BYTES_PER_TOKEN bounds their number.
NOMINAL_BYTES_PER_TOKEN = 64


def plan_kv(
    layouts: tuple[CacheLayout, ...],
    config: dict[str, Any],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int | None,
    backend: AttentionBackend,
    max_source_len: int = 0,
) -> KVPlan:
    """Return the KV memory that a model needs for sequences of full length, in blocks.

    Each sequence of an encoder-decoder has a source of ``max_source_len`` positions besides.

    Raises:
        ConfigError: ``max_model_len`` exceeds the longest sequence that config.json allows.
    """
    longest = context_length(config)
    if max_model_len is not None and longest is not None and max_model_len > longest:
        raise ConfigError(f"--max-model-len is {max_model_len}; the model takes {longest} tokens.")
    length = max_model_len or longest or DEFAULT_MAX_MODEL_LEN
    per_token = sum(backend.bytes_per_token(shape) for shape in kv_shapes(layouts))
    per_token = per_token or NOMINAL_BYTES_PER_TOKEN
    is_opaque = any(isinstance(layout, OpaqueLayout) for layout in leaves(layouts))
    state_bytes = sum(layout.num_bytes for layout in state_layouts(layouts))
    plan = KVPlan(
        cache.block_size,
        per_token * cache.block_size,
        0,
        length,
        state_bytes=0 if is_opaque else state_bytes,
        has_kv=bool(kv_shapes(layouts)),
        max_source_len=max_source_len,
    )
    return replace(plan, wanted_blocks=plan.context_blocks * scheduler.max_num_seqs)


def max_scores(
    layouts: tuple[CacheLayout, ...], config: dict[str, Any], dtype: mx.Dtype, num_ranks: int = 1
) -> float:
    """Return the most scores of a head that a module computes at once for a prompt.

    On Metal modules that call MLX's attention, or multiply queries and keys themselves, keep all
    scores in memory unless MLX fuses it. Other devices have no bound.
    """
    fuses = all(is_fused(shape.key_dim, shape.value_dim) for shape in kv_shapes(layouts))
    if fuses or backend_name() != "metal":
        return math.inf
    return SCORE_BYTES / (max(1, query_heads(config) // num_ranks) * dtype.size)
