"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.engine.interface import EncoderModel, ServedModel

router = APIRouter()


@router.get("/models")
async def list_models(engine: EngineDep) -> dict[str, Any]:
    """Every name of every served model, and every loaded adapter."""
    cards = [card(name, model) for model in engine.models() for name in model.names]
    adapters = [engine.get_model(info.name) for info in engine.control.adapters()]
    cards += [card(one.names[0], one) for one in adapters]
    cards += [card(name, model) for model in engine.encoders.models() for name in model.names]
    return {"object": "list", "data": cards}


@router.get("/models/{model_id:path}")
async def retrieve_model(model_id: str, engine: EngineDep) -> dict[str, Any]:
    """One model; ids may contain slashes."""
    found = {name: one for one in engine.encoders.models() for name in one.names}.get(model_id)
    return card(model_id, found or engine.get_model(model_id))


def card(name: str, model: ServedModel | EncoderModel) -> dict[str, Any]:
    """A model as OpenAI and vLLM describe it."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "mlx_parallm",
        "root": model.root,
        "parent": model.parent if isinstance(model, ServedModel) else None,
        "max_model_len": model.info.max_model_len,
        "permission": [],
    }
