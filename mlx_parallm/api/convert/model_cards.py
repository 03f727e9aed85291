"""Models as OpenAI and vLLM describe them, and with what they take and where they are."""

from __future__ import annotations

from typing import Any

from mlx_parallm.engine.interface import EncoderState, EncoderStatus, ServedModel


def model_card(name: str, model: ServedModel) -> dict[str, Any]:
    """A model that generates, or an adapter of one."""
    card = _card(name, model.created, model.root, model.info.max_model_len)
    return card | {"parent": model.parent, "status": EncoderState.LOADED, "progress": 1.0}


def encoder_card(name: str, status: EncoderStatus) -> dict[str, Any]:
    """An encoder, whether it is in memory or not."""
    model = status.model
    created = 0 if model is None else model.created
    longest = None if model is None else model.info.max_model_len
    return _card(name, created, status.root, longest) | {
        "parent": None,
        "status": status.state,
        "progress": round(status.progress, 3),
        "pinned": status.is_pinned,
    }


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
