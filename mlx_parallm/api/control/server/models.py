"""``/v1/models`` in the forms of OpenAI, vLLM and Anthropic; models come and go."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Header, Query, Request
from pydantic import AliasChoices, BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.control.weights.schema import FolderPath, Name
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.http.keep_alive import KeepAlive
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.config import ModelTask
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.models import ModelMemory, ServedModel
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.training.jobs.service import JobService
from mlx_parallm.types.errors import InvalidRequestError

routes = Routes(SERVER, short=True)
# _MAX_PAGE: models in a page of Anthropic's form.
_MAX_PAGE = 1000
#: Present in the requests of Anthropic's clients, which read answers of their own form.
Version = Annotated[str | None, Header(alias="anthropic-version")]
MAX_NAMES = 16


def model_card(name: str, status: ModelStatus, memory: Mapping[str, ModelMemory]) -> dict[str, Any]:
    """Return the description of a model of any kind, or of an adapter, loaded or not.

    An adapter's memory is part of its model's.
    """
    model: ServedModel | None = status.model
    parts = memory.get(status.names[0])
    card: dict[str, Any] = {
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
        "pinned": status.is_pinned,
        "size_bytes": status.size_bytes,
        "ttl": status.ttl_s,
    }
    if model is not None:
        card |= model.card()
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


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class LoadModel(OpenForm):
    """A model to load, or a served one to bring into memory."""

    model: FolderPath = Field(
        validation_alias=AliasChoices("model", "model_path"),
        description="A folder or a hub id that this server may load, or a name that is served.",
    )
    name: Annotated[list[Name], BeforeValidator(_listed), Field(max_length=MAX_NAMES)] = Field(
        default_factory=list,
        validation_alias=AliasChoices("name", "served_model_name"),
        description="A name for requests, or several; by default the folder or id.",
    )
    task: Literal["auto"] | ModelTask = Field(
        "auto", description="Its task; by default what its files say."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = Field(
        None, description="Its dtype; the server's --dtype by default."
    )
    revision: StrictStr | None = Field(None, description="Branch, tag or commit on the hub.")
    max_model_len: StrictInt | None = Field(
        None, ge=1, description="Longest input in tokens; the model's own by default."
    )
    pin: StrictBool = Field(False, description="True keeps it in memory until it is unloaded.")
    ttl: KeepAlive = None


class UnloadModel(OpenForm):
    """A model to unload."""

    model: Name = Field(
        validation_alias=AliasChoices("model", "instance_id"), description="One of its names."
    )


@routes.get("/v1/models")
async def list_models(
    engine: EngineDep,
    anthropic_version: Version = None,
    limit: Annotated[str, Query(description="1 to 1000.")] = "20",
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """List every name of every served model, every loaded adapter, and those of jobs.

    With the header ``anthropic-version`` the answer is a page in Anthropic's form; only there
    ``limit``, ``after_id`` and ``before_id`` have an effect.
    """
    size = 0 if anthropic_version is None else _page_size(limit)
    memory = await engine.memory()
    statuses = engine.statuses()
    loaded = [info.name for info in engine.control.adapters()]
    adapters = [_status(engine, name) for name in (*loaded, *engine.control.unloaded())]
    num_defaults = sum(each.is_default for each in statuses)
    ordered = (*statuses[:num_defaults], *adapters, *statuses[num_defaults:])
    cards = [_card(engine, name, each, memory) for each in ordered for name in each.names]
    if anthropic_version is not None:
        return anthropic_page(cards, limit=size, after=after_id, before=before_id)
    return {"object": "list", "data": cards}


@routes.get("/v1/models/{model_id:path}")
async def retrieve_model(
    model_id: str, engine: EngineDep, anthropic_version: Version = None
) -> dict[str, Any]:
    """Return the description of a model; ids may contain slashes.

    With the header ``anthropic-version`` it has Anthropic's form.
    """
    card = _card(engine, model_id, _status(engine, model_id), await engine.memory())
    return card if anthropic_version is None else anthropic_model(card)


@routes.delete("/v1/models/{model_id:path}", access=Access.ADMIN)
async def delete_model(model_id: str, request: Request, engine: EngineDep) -> dict[str, Any]:
    """Unload an adapter or a model that was loaded at run time, or delete what a job has made.

    Running requests finish with it; a job stays. Other models are refused.
    """
    jobs: JobService | None = request.app.state.jobs
    if jobs is None or not await jobs.delete_model(model_id):
        engine.directory.check_delete(model_id)
        status = _status(engine, model_id)
        if status.parent is not None:
            await engine.control.unload_adapter(status.names[0])
        else:
            await engine.unload_model(model_id)
    return {"id": model_id, "object": "model", "deleted": True}


@routes.get("/v1/memory")
async def read_memory(engine: EngineDep) -> dict[str, Any]:
    """List the memory that is promised to models on each device, and what is left of its limit.

    The limit is null until it is known: with the first load while the server runs.
    """
    claims, limit = engine.directory.claims()
    promised = sum(claim.num_bytes for claim in claims)
    return {
        "object": "memory",
        "limit_bytes": limit,
        "promised_bytes": promised,
        "free_bytes": None if limit is None else limit - promised,
        "claims": [
            {"model": claim.model, "what": claim.what, "bytes": claim.num_bytes} for claim in claims
        ],
    }


def _card(
    engine: EngineClient, name: str, status: ModelStatus, memory: Mapping[str, ModelMemory]
) -> dict[str, Any]:
    left_s = engine.directory.expires_in_s(name)
    return model_card(name, status, memory) | {"expires_in_s": left_s and math.ceil(left_s)}


def _page_size(limit: str) -> int:
    if re.fullmatch("[0-9]{1,4}", limit) and 1 <= int(limit) <= _MAX_PAGE:
        return int(limit)
    raise InvalidRequestError(f"limit must be 1 to {_MAX_PAGE}.", param="limit")


def _status(engine: EngineClient, name: str) -> ModelStatus:
    status = engine.find(name)
    if status is None:
        raise engine.not_found(name)
    return status


@routes.post("/v1/models/load", access=Access.ADMIN)
async def load_model(body: LoadModel, engine: EngineDep) -> dict[str, Any]:
    """Load a model; the answer comes once it is loaded."""
    alike = body.model_dump(include={"model", "task", "dtype", "revision", "max_model_len"})
    wanted = ModelLoad(names=tuple(body.name), is_pinned=body.pin, ttl_s=body.ttl, **alike)
    status = await engine.load_model(wanted)
    return _card(engine, status.names[0], status, await engine.memory())


@routes.post("/v1/models/unload", access=Access.ADMIN)
async def unload_model(body: UnloadModel, engine: EngineDep) -> dict[str, Any]:
    """Unload a model, and free its memory once its requests have ended."""
    status = await engine.unload_model(body.model)
    return {"id": status.names[0], "object": "model", "unloaded": True}
