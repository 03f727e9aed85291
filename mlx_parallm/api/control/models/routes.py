"""What is served: ``GET /v1/models``, ``/v1/models/{id}``, and loading and unloading encoders."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.control.models.answer import encoder_card, model_card
from mlx_parallm.api.control.models.schema import LoadModel, UnloadModel
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.engine.interface import ModelLoad

routes = Routes(SERVER, short=True)


@routes.get("/v1/models")
async def list_models(engine: EngineDep) -> dict[str, Any]:
    """Every name of every served model, and every loaded adapter."""
    memory = await engine.memory()
    cards = [model_card(name, model, memory) for model in engine.models() for name in model.names]
    for info in engine.control.adapters():
        status = engine.encoders.find(info.name)
        if status is None:
            cards.append(model_card(info.name, engine.get_model(info.name), memory))
        else:
            cards.append(encoder_card(info.name, status, memory))
    statuses = engine.encoders.statuses()
    cards += [encoder_card(name, one, memory) for one in statuses for name in one.names]
    return {"object": "list", "data": cards}


@routes.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, engine: EngineDep) -> dict[str, Any]:
    """One model; ids may contain slashes."""
    status = engine.encoders.find(model_id)
    if status is not None:
        return encoder_card(model_id, status, await engine.memory())
    return model_card(model_id, engine.get_model(model_id), await engine.memory())


@routes.post("/v1/models/load", access=Access.ADMIN)
async def load_model(body: LoadModel, engine: EngineDep) -> dict[str, Any]:
    """Serve one more encoder; answered once it is loaded."""
    asked = ModelLoad(
        model=body.model,
        names=tuple(body.name),
        task=body.task,
        dtype=body.dtype,
        revision=body.revision,
        max_model_len=body.max_model_len,
        is_pinned=body.pin,
    )
    status = await engine.encoders.load(asked)
    return encoder_card(status.names[0], status, await engine.memory())


@routes.post("/v1/models/unload", access=Access.ADMIN)
async def unload_model(body: UnloadModel, engine: EngineDep) -> dict[str, Any]:
    """Serve an encoder no more, and give back its memory once its requests have ended."""
    status = await engine.encoders.unload(body.model)
    return {"id": status.names[0], "object": "model", "unloaded": True}
