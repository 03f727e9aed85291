"""The LM head of checkpoints whose config does not say whether it is tied."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.models.checkpoints.rope_fields import TEXT_CONFIGS
from mlx_parallm.models.indexed_weights import read_weights
from mlx_parallm.types.json_values import is_mapping

logger = logging.getLogger(__name__)

FIELD = "tie_word_embeddings"
HEAD = "lm_head"


def tied_as_saved(
    read: Mapping[str, Any], config: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return a config whose LM head is tied if no one unties it and the files have none.

    transformers' default of some families is an untied head, mlx_lm's a tied one, so folders
    without the field may have either.

    Args:
        read: the result of ``readable_config``.
        config: the ``config.json`` that it was made from.
        folder: the checkpoint, of which only the names of weights are read.

    Raises:
        ModelLoadError: a file of weights cannot be read.
    """
    tied = dict(read)
    for name in TEXT_CONFIGS:
        if is_mapping(config.get(name)):
            tied[name] = tied_as_saved(read[name], config[name], folder)
    if FIELD in config or read.get(FIELD) is not False or _has_head(folder):
        return tied
    logger.warning(
        "%s: neither has config.json %s nor the files a head, so it is tied", folder, FIELD
    )
    return {**tied, FIELD: True}


def _has_head(folder: Path) -> bool:
    return any(HEAD in name.split(".") for name in read_weights(folder))
