"""The memory that a model could use: the size and number of its KV blocks, and its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.kv_plan import KVPlan
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.attention.dense import SCORE_BYTES, is_fused
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.generation.cache_layout import CacheLayout, kv_shapes

# LENGTH_KEYS and HEAD_KEYS are fields of config.json for the longest sequence and the number of
# attention heads, in order of preference.
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# LEARNED_POSITIONS: the field that sizes the table of positions, by model type, and its default.
# A position beyond the table reads foreign memory, whatever the other fields say.
LEARNED_POSITIONS = {
    "gpt2": ("n_positions", 1024),
    "gpt_bigcode": ("n_positions", 1024),
    "opt": ("max_position_embeddings", 2048),
}
DEFAULT_MAX_MODEL_LEN = 4096
# A model without KV still has block tables. NOMINAL_BYTES_PER_TOKEN bounds their number.
NOMINAL_BYTES_PER_TOKEN = 64


def plan_kv(
    layouts: tuple[CacheLayout, ...],
    config: dict[str, Any],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int | None,
    backend: AttentionBackend,
) -> KVPlan:
    """Return the KV memory that a model needs for sequences of full length, in blocks.

    Raises:
        ConfigError: ``max_model_len`` exceeds the longest sequence that config.json allows.
    """
    longest = context_length(config)
    if max_model_len is not None and longest is not None and max_model_len > longest:
        raise ConfigError(f"--max-model-len is {max_model_len}; the model takes {longest} tokens.")
    length = max_model_len or longest or DEFAULT_MAX_MODEL_LEN
    per_token = sum(backend.bytes_per_token(shape) for shape in kv_shapes(layouts))
    per_token = per_token or NOMINAL_BYTES_PER_TOKEN
    blocks_per_sequence = -(-length // cache.block_size)
    return KVPlan(
        cache.block_size,
        per_token * cache.block_size,
        blocks_per_sequence * scheduler.max_num_seqs,
        length,
    )


def context_length(config: dict[str, Any]) -> int | None:
    """Return the longest sequence, in tokens, that a config.json allows.

    It is None if no key has a number of tokens; 0 and -1 stand for no limit in some configs.
    """
    learned = learned_positions(config)
    if learned is not None:
        return learned
    lengths = (config_value(config, key) for key in LENGTH_KEYS)
    return next((length for length in lengths if length is not None and length > 0), None)


def learned_positions(config: Mapping[str, Any]) -> int | None:
    """Return how many positions a model has vectors for; None if it computes any position."""
    field = LEARNED_POSITIONS.get(str(config.get("model_type")))
    if field is None:
        return None
    name, default = field
    length = config_value(config, name)
    return default if length is None else length


def query_heads(config: dict[str, Any]) -> int:
    """Return the number of attention heads of a layer; 1 if a config.json does not say."""
    heads = (config_value(config, key) for key in HEAD_KEYS)
    return next((count for count in heads if count is not None), 1)


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


def config_value(config: Mapping[str, Any], key: str) -> int | None:
    """Return an integer field of a config.json, or of its ``text_config``; None if it has none."""
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get(key), int):
            return part[key]
    return None
