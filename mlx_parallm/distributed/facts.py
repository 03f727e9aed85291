"""Facts that all ranks must have alike, as texts that can be compared and shown."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx_parallm.config import EngineConfig, MemoryConfig, ModelConfig, RanksConfig
from mlx_parallm.engine.build import model_names
from mlx_parallm.types.content import package_versions
from mlx_parallm.types.json_values import is_mapping, is_sequence
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.weights.revision import folder_revision


def process_facts(config: EngineConfig) -> dict[str, str]:
    """Return the versions, the device's kind and the settings of this process, by name.

    Paths may differ between machines, so a model counts by its names.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    facts = {"Python": python, "backend": backend_name()}
    facts |= {f"version of {name}": version for name, version in package_versions().items()}
    models = tuple(_named(model) for model in config.models)
    ranks = RanksConfig(size=config.ranks.size, backend=config.ranks.backend)
    shared = replace(
        config, models=models, ranks=ranks, memory=MemoryConfig(), kernel_cache_dir=None
    )
    return facts | dict(_flat("setting", asdict(shared)))


def checkpoint_facts(folders: Mapping[str, Path]) -> dict[str, str]:
    """Return each model's configuration and the digest of its files, by the model's name.

    The digest covers the configuration too, whose fields say what differs.
    """
    facts: dict[str, str] = {}
    for name, path in folders.items():
        facts |= _flat(f"config of {name}", _read_config(path))
        facts[f"files of {name}"] = folder_revision(path)
    return facts


def _read_config(folder: Path) -> Any:
    """Return what is in a model's ``config.json``; None if it cannot be read."""
    try:
        return json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        # The load says what is wrong.
        return None


def _named(model: ModelConfig) -> ModelConfig:
    return replace(model, path=None, served_names=model_names(model))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested settings, each with its path."""
    if is_mapping(value) and value:
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    elif is_sequence(value) and value:
        for place, each in enumerate(value):
            yield from _flat(f"{name}.{place}", each)
    else:
        yield name, repr(value)
