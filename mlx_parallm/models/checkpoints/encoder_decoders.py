"""The architectures whose decoder attends to an encoder's output, by their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: ``ENCODER_DECODER_TYPES``: what ``model_type`` is in their configs.
ENCODER_DECODER_TYPES = frozenset(
    {"bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5"}
)


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Return True if a config is an encoder-decoder's that this package serves."""
    return config.get("model_type") in ENCODER_DECODER_TYPES
