"""Models as OpenAI and vLLM describe them, and with what they take and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mlx_parallm.engine.interface import ModelMemory, ModelState, ModelStatus
from mlx_parallm.generation.model import GenerationModel


def model_card(
    name: str, model: GenerationModel, memory: Mapping[str, ModelMemory]
) -> dict[str, Any]:
    """A model that generates, or an adapter of one; the latter's memory is in its model's."""
    card = _card(name, model.created, model.root, model.info.max_model_len)
    return card | {
        "tasks": ["generate"],
        "parent": model.parent,
        "status": ModelState.LOADED,
        "progress": 1.0,
        "memory": _memory(model.names[0], memory),
    }


def encoder_card(
    name: str, status: ModelStatus, memory: Mapping[str, ModelMemory]
) -> dict[str, Any]:
    """An encoder, or an adapter of one, whether its model is in memory or not."""
    model = status.model
    created = 0 if model is None else model.created
    longest = None if model is None else model.info.max_model_len
    return _card(name, created, status.root, longest) | {
        "tasks": None if model is None else list(model.info.tasks),
        "parent": status.parent,
        "status": status.state,
        "progress": round(status.progress, 3),
        "pinned": status.is_pinned,
        "memory": _memory(status.names[0], memory),
    }


def _memory(name: str, memory: Mapping[str, ModelMemory]) -> dict[str, int] | None:
    """In bytes; None of an adapter."""
    found = memory.get(name)
    if found is None:
        return None
    return {f"{kind}_bytes": size for kind, size in asdict(found).items()}


def _card(name: str, created: int, root: str, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mlx_parallm",
        "root": root,
        "max_model_len": max_model_len,
        "permission": [],
    }
