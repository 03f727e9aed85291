"""Models in OpenAI's and vLLM's form, with their memory and folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mlx_parallm.engine.interface import ModelMemory, ModelStatus, ServedModel


def model_card(name: str, status: ModelStatus, memory: Mapping[str, ModelMemory]) -> dict[str, Any]:
    """Return the description of a model of any kind, or of an adapter, loaded or not.

    An adapter's memory is part of its model's.
    """
    model: ServedModel | None = status.model
    parts = memory.get(status.names[0])
    card = {
        "id": name,
        "object": "model",
        "created": 0 if model is None else model.created,
        "owned_by": "mlx_parallm",
        "root": status.root if model is None or status.parent else model.root,
        "max_model_len": None if model is None else model.max_len,
        "permission": [],
        "tasks": None if model is None else list(model.tasks),
        "input_modalities": None if model is None else list(model.input_modalities),
        "parent": status.parent,
        "status": status.state,
        "progress": round(status.progress, 3),
        "memory": parts and {f"{part}_bytes": size for part, size in asdict(parts).items()},
    }
    if model is None or model.traits.loads_later:
        card["pinned"] = status.is_pinned
    return card
