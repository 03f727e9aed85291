"""The architectures whose decoder attends to an encoder's output, by their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_parallm.models.checkpoints.decoder_sizes import config_value

#: ``ENCODER_DECODER_TYPES``: what ``model_type`` is in their configs.
ENCODER_DECODER_TYPES = frozenset(
    {"bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper"}
)
#: ``SPEECH_TYPES``: those of them whose sources are sound.
SPEECH_TYPES = frozenset({"whisper"})


#: ``SHARED_FIELD``: says if source and target have one table of word embeddings.
SHARED_FIELD = "share_encoder_decoder_embeddings"


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Return True if a config is an encoder-decoder's that this package serves."""
    return config.get("model_type") in ENCODER_DECODER_TYPES


def target_vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of token ids that a model writes; None if the config does not say."""
    of_targets = config_value(config, "decoder_vocab_size") if _has_two_tables(config) else None
    return of_targets or config_value(config, "vocab_size")


def source_vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of token ids of sources if they have their own; None if not."""
    return config_value(config, "vocab_size") if _has_two_tables(config) else None


def _has_two_tables(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "marian" and not config.get(SHARED_FIELD, True)
