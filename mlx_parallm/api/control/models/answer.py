"""Models in OpenAI's and vLLM's form, with their memory and folder, and in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from mlx_parallm.engine.models import ModelMemory, ServedModel
from mlx_parallm.engine.status import ModelStatus


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


def anthropic_model(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's description in Anthropic's form.

    Source: https://docs.claude.com/en/api/models-list.
    """
    created = datetime.fromtimestamp(card["created"], UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": card["max_model_len"],
    }


def anthropic_page(
    cards: Sequence[Mapping[str, Any]], *, limit: int, after: str | None, before: str | None
) -> dict[str, Any]:
    """Return up to ``limit`` models after one or before one, in Anthropic's form.

    Next to an id that no model has there is none.
    """
    ids = [card["id"] for card in cards]
    begin = ids.index(after) + 1 if after in ids else len(ids) if after is not None else 0
    end = ids.index(before) if before in ids else 0 if before is not None else len(ids)
    rest = cards[begin:end]
    page = rest[-limit:] if before is not None and after is None else rest[:limit]
    return {
        "data": [anthropic_model(card) for card in page],
        "has_more": len(page) < len(rest),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
