"""Reads from a decoder's files what it does as a pooling model."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.config import ModelConfig, ModelTask
from mlx_parallm.models.checkpoints.decoders import reads_both_ways
from mlx_parallm.models.checkpoints.encoders import ENCODER_TYPES
from mlx_parallm.models.checkpoints.model_task import decoder_task
from mlx_parallm.models.checkpoints.sentence_transformers import (
    module_kinds,
    read_fields,
    read_json,
    transformer_folder,
)
from mlx_parallm.types.json_values import is_object


def task_of(config: ModelConfig, path: Path) -> ModelTask:
    """Return the task of a folder with a decoder: the configured one, else the files' own.

    Raises:
    ModelLoadError: a file of it cannot be read.
    """
    if config.task != "auto":
        return config.task
    model_config = read_json(path / "config.json")
    # A config that is no object is reported when the model is loaded.
    return decoder_task(model_config, module_kinds(path)) if is_object(model_config) else "generate"


def reads_on(path: Path) -> bool:
    """True if tokens of a folder's model attend only to earlier tokens."""
    model_config = read_fields(transformer_folder(path) / "config.json")
    return model_config.get("model_type") not in ENCODER_TYPES and not reads_both_ways(model_config)
