"""Sizes that a decoder's config.json gives: its longest sequence, its positions, its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# LENGTH_KEYS and HEAD_KEYS are fields of config.json for the longest sequence and the number of
# attention heads, in order of preference.
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
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
    heads = (config_value(config, key) for key in HEAD_KEYS)
    return next((count for count in heads if count is not None), 1)


def config_value(config: Mapping[str, Any], key: str) -> int | None:
    """Return an integer field of a config.json, or of its ``text_config``; None if it has none."""
    text: Mapping[str, Any] = config.get("text_config") or {}
    for part in (config, text):
        if isinstance(part.get(key), int):
            return part[key]
    return None
