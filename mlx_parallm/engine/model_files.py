"""Finds a model's files, and the kind of model that they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.interface import Kind, TellProgress
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


def fetch_model(model: ModelConfig, source: str, on_progress: TellProgress) -> Path:
    """Return the folder of a hub id or path, fetched first where need be."""
    return resolve_model(
        source,
        model.revision,
        on_progress=on_progress,
        trust_remote_code=model.trust_remote_code,
    )
