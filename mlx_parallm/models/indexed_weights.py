"""A checkpoint's weights, each from the file that the index names for it, and its tied LM head."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.checkpoints.encoder_decoders import is_encoder_decoder
from mlx_parallm.models.checkpoints.rope_fields import TEXT_CONFIGS
from mlx_parallm.models.checkpoints.weight_files import weight_files, weight_map
from mlx_parallm.models.seq2seq.tables import saved_fields
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_mapping

logger = logging.getLogger(__name__)

TIE_FIELD = "tie_word_embeddings"
LM_HEAD = "lm_head"


def read_weights(folder: Path) -> Weights:
    """Return a checkpoint's weights by name, not evaluated; none if it has no files.

    Files may also have weights that the index does not name, or names for another file: those of an
    overlay beside the files that it changes, for example. They are left out.

    Raises:
        ModelLoadError: see ``weight_files``; or a file is broken.
    """
    placed = weight_map(folder)
    weights: Weights = {}
    for file in weight_files(folder):
        arrays = _loaded(file)
        if file.name in placed.values():
            arrays = {key: each for key, each in arrays.items() if placed.get(key) == file.name}
        weights |= arrays
    return weights


def reading_index(model_class: type, folder: Path) -> Any:
    """Return what makes models of a class of mlx_lm that get ``read_weights`` when mlx_lm loads it.

    It is the class itself if mlx_lm reads no other weights. A model keeps nothing of the load.
    """
    own = read_weights(folder)
    if sum(len(_loaded(file)) for file in weight_files(folder)) == len(own):
        return model_class

    def model_of(args: Any) -> Any:
        """Return a model whose first ``sanitize``, the load's, converts the folder's weights."""
        model = model_class(args)

        def sanitize(weights: Weights) -> Weights:
            """Return the weights of the checkpoint by this model's names."""
            del weights, model.sanitize
            return model.sanitize(own) if hasattr(model, "sanitize") else own

        model.sanitize = sanitize
        return model

    return model_of


def _loaded(file: Path) -> Weights:
    try:
        return cast("Weights", mx.load(str(file)))
    except (OSError, RuntimeError, ValueError) as cause:
        raise ModelLoadError(f"{file} could not be read: {cause}") from cause


def tied_as_saved(
    read: Mapping[str, Any], config: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return a config whose LM head is tied if no one unties it and the files have none.

    transformers' default of some families is an untied head, mlx_lm's a tied one, so folders
    without the field may have either. The field of an encoder-decoder does not count: its head is
    tied if the files have no other than the table of word embeddings.

    Args:
        read: the result of ``readable_config``.
        config: the ``config.json`` that it was made from.
        folder: the checkpoint; a decoder's weights are not read.

    Raises:
        ModelLoadError: a file of weights cannot be read.
    """
    if is_encoder_decoder(config):
        return {**read, **saved_fields(config, read_weights(folder))}
    tied = dict(read)
    for name in TEXT_CONFIGS:
        if is_mapping(config.get(name)):
            tied[name] = tied_as_saved(read[name], config[name], folder)
    if TIE_FIELD in config or read.get(TIE_FIELD) is not False or _has_head(folder):
        return tied
    logger.warning(
        "%s: neither has config.json %s nor the files a head, so it is tied", folder, TIE_FIELD
    )
    return {**tied, TIE_FIELD: True}


def _has_head(folder: Path) -> bool:
    return any(LM_HEAD in name.split(".") for name in read_weights(folder))
