"""Sizes that a decoder's config.json gives: its longest sequence, its positions, its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mlx_parallm.types.json_values import is_mapping

# LENGTH_KEYS and HEAD_KEYS are fields of config.json for the longest sequence and the number of
# attention heads, in order of preference.
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# LAYER_KEYS, WIDTH_KEYS: the number of layers and the width of a hidden state, likewise.
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
# KV_LAYERS: entries of ``layer_types`` that stand for layers with KV.
KV_LAYERS = frozenset(
    {
        "attention",
        "chunked_attention",
        "full_attention",
        "hybrid",
        "indexed_attention",
        "sliding_attention",
    }
)
# WHOLE_LATENT: types with latent attention whose modules keep keys and values of each head.
WHOLE_LATENT = frozenset({"deepseek_v2", "minicpm3"})
# LEARNED_POSITIONS: the field that sizes the table of positions, learned or of sinusoids, by model
# type, and its default. A position beyond the table reads foreign memory, whatever the other fields
# say.
LEARNED_POSITIONS = {
    "bart": ("max_position_embeddings", 1024),
    "gpt2": ("n_positions", 1024),
    "gpt_bigcode": ("n_positions", 1024),
    "m2m_100": ("max_position_embeddings", 1024),
    "marian": ("max_position_embeddings", 1024),
    "mbart": ("max_position_embeddings", 1024),
    "opt": ("max_position_embeddings", 2048),
    "pegasus": ("max_position_embeddings", 1024),
    "whisper": ("max_target_positions", 448),
}
#: ``UNBOUNDED``: types whose positions have no end. Older configs of T5 have ``n_positions``, the
#: length of the texts that it was trained with.
UNBOUNDED = frozenset({"mt5", "t5", "umt5"})
DEFAULT_MAX_MODEL_LEN = 4096


def context_length(config: dict[str, Any]) -> int | None:
    """Return the longest sequence, in tokens, that a config.json allows.

    It is None if no key has a number of tokens; 0 and -1 stand for no limit in some configs.
    """
    learned = learned_positions(config)
    if learned is not None or config.get("model_type") in UNBOUNDED:
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
    return _first_value(config, HEAD_KEYS) or 1


def kv_bytes_per_token(config: Mapping[str, Any]) -> int | None:
    """Return the bytes of a token's KV in all layers; None if a config.json does not say.

    It is an estimate, for models whose weights are not here yet: loading them measures it.
    """
    layers, heads = _kv_layers(config), _first_value(config, HEAD_KEYS)
    if layers is None or heads is None or heads < 1:
        return None
    dtype = str(_field(config, "torch_dtype") or _field(config, "dtype"))
    size = 4 if dtype == "float32" else 2
    if config_value(config, "kv_lora_rank") is not None:
        return layers * _latent_values(config, heads) * size
    kv_heads = 1 if _field(config, "multi_query") is True else None
    kv_heads = kv_heads or config_value(config, "num_key_value_heads") or heads
    width = _first_value(config, WIDTH_KEYS)
    key_dim = config_value(config, "head_dim") or (width // heads if width else None)
    return None if key_dim is None else layers * 2 * kv_heads * key_dim * size


def _latent_values(config: Mapping[str, Any], heads: int) -> int:
    """Return how many numbers a layer with latent attention keeps of a token."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim")
    rank, rope, nope, value, index = (config_value(config, name) or 0 for name in names)
    if config.get("model_type") in WHOLE_LATENT:
        return heads * (nope + rope + value)
    # An indexer keeps keys of its own, and as much again that it does not use.
    return rank + rope + 2 * index


def _kv_layers(config: Mapping[str, Any]) -> int | None:
    kinds = _field(config, "layer_types")
    if isinstance(kinds, list):
        return sum(str(kind) in KV_LAYERS for kind in cast("list[Any]", kinds))
    return _first_value(config, LAYER_KEYS)


def _first_value(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    values = (config_value(config, key) for key in keys)
    return next((value for value in values if value is not None), None)


def _field(config: Mapping[str, Any], key: str) -> Any:
    return config.get(key, _text_config(config).get(key))


def config_value(config: Mapping[str, Any], key: str) -> int | None:
    """Return an integer field of a config.json, or of its ``text_config``; None if it has none."""
    for part in (config, _text_config(config)):
        if isinstance(part.get(key), int):
            return part[key]
    return None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if is_mapping(text) else {}
