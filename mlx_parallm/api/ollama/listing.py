"""Ollama's lists and descriptions of models; models are made and fetched elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.api.control.server.models import list_models, retrieve_model
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.ollama.dialect import OLLAMA
from mlx_parallm.api.ollama.models import described, listed, running, served_name
from mlx_parallm.api.ollama.schema import ShowRequest
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import NotFoundError

routes = Routes(SERVER, dialect=OLLAMA)
#: ``VERSION``: the version of Ollama with this API; clients ask for the least that they need.
VERSION = "0.13.0"
_Entry = Callable[[Mapping[str, Any], Any], dict[str, Any] | None]


@routes.get("/api/tags")
async def ollama_tags(engine: EngineDep) -> dict[str, Any]:
    """List the models that Ollama's routes can use."""
    return {"models": await _entries(engine, listed)}


@routes.get("/api/ps")
async def ollama_ps(engine: EngineDep) -> dict[str, Any]:
    """List those of them that are in memory."""
    return {"models": await _entries(engine, running)}


@routes.post("/api/show")
async def ollama_show(body: ShowRequest, engine: EngineDep) -> dict[str, Any]:
    """Describe a model: its context, its template and what it can do."""
    name = served_name(engine, body.model) or engine.statuses()[0].names[0]
    return described(await retrieve_model(name, engine), _model(engine, name))


@routes.get("/api/version")
async def ollama_version() -> dict[str, str]:
    """Return the version of Ollama with this API."""
    return {"version": VERSION}


@routes.post("/api/pull", body_limit=INPUT, include_in_schema=False)
@routes.post("/api/push", body_limit=INPUT, include_in_schema=False)
@routes.post("/api/create", body_limit=INPUT, include_in_schema=False)
@routes.post("/api/copy", body_limit=INPUT, include_in_schema=False)
@routes.delete("/api/delete", body_limit=INPUT, include_in_schema=False)
@routes.get("/api/blobs/{digest}", include_in_schema=False)
@routes.post("/api/blobs/{digest}", body_limit=INPUT, include_in_schema=False)
async def ollama_library() -> None:
    """Refuse to change the models on disk."""
    raise NotFoundError(
        "Models are not fetched, made or deleted by Ollama's routes here: start the server with "
        "them, or load them by POST /v1/models/load."
    )


async def _entries(engine: EngineClient, entry: _Entry) -> list[dict[str, Any]]:
    cards = (await list_models(engine))["data"]
    entries = (entry(card, _model(engine, card["id"])) for card in cards)
    return [each for each in entries if each is not None]


def _model(engine: EngineClient, name: str) -> Any:
    status = engine.find(name)
    return None if status is None else status.model
