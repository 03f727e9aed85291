"""Finds a model's files, and the kind of model that they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from mlx_parallm.config import ModelConfig
from mlx_parallm.demo_models.folders import DEMO_NAME, demo_folder
from mlx_parallm.engine.kind import Kind, TellProgress
from mlx_parallm.models.checkpoints.overrides import lasting_folder_with
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.weights.hub import resolve_model

K = TypeVar("K", bound=Kind)


def kind_of(kinds: Sequence[K], config: ModelConfig, path: Path) -> K:
    """Return the first kind that serves a folder's model.

    Raises:
        ModelLoadError: a file of it cannot be read.
        ConfigError: none does.
    """
    for kind in kinds:
        if kind.serves(config, path):
            return kind
    raise ConfigError(f"{config.path} is a kind of model that this server does not know.")


def model_folder(model: ModelConfig, on_progress: TellProgress) -> Path:
    """Return the folder of a model that is served, with the changes of its config.

    Raises:
        ConfigError: the config cannot be changed so.
        ModelLoadError: it cannot be fetched or read.
    """
    source = model.path or DEMO_NAME
    folder = demo_folder(source) or fetch_model(model, source, on_progress)
    return lasting_folder_with(folder, model.hf_overrides)


def fetch_model(model: ModelConfig, source: str, on_progress: TellProgress) -> Path:
    """Return the folder of a hub id or path, fetched first where need be."""
    return resolve_model(
        source,
        model.revision,
        on_progress=on_progress,
        trust_remote_code=model.trust_remote_code,
    )
