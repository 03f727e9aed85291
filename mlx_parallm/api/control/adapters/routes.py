"""Adapters while the server runs: uploads, lists, and vLLM's and SGLang's routes for folders."""

from __future__ import annotations

import asyncio
import time

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from mlx_parallm.api.control.adapters.request import (
    FILE,
    card,
    loaded_adapters,
    read_serialized,
    read_upload,
    refuse_3d_weights,
    uploaded,
)
from mlx_parallm.api.control.adapters.schema import (
    AdapterCard,
    AdapterFields,
    AdapterList,
    DeletedAdapter,
    LoadLora,
    LoraAnswer,
    LoraTensors,
    UnloadLora,
    UploadedAdapter,
)
from mlx_parallm.api.control.tensors import serialized_schema, timings, upload_schema
from mlx_parallm.api.http.declared import ADAPTER, Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.ignored import tell_ignored
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.uploads import receive
from mlx_parallm.api.sglang.dialect import SGLANG
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import NotFoundError

#: With and without ``/v1``.
routes = Routes(SERVER, access=Access.ADMIN, short=True)

HEADER_PREFIX = "x-adapter-"


@routes.post(
    "/v1/update_adapter_weights",
    body_limit=ADAPTER,
    openapi_extra=upload_schema(AdapterFields, FILE),
    response_model=UploadedAdapter,
)
async def update_adapter_weights(request: Request, engine: EngineDep, response: Response) -> object:
    """Serve an adapter whose tensors are in the body, or replace one between two steps.

    The query or headers ``x-adapter-…`` bring the fields of a body that is nothing but tensors.
    """
    received = await receive(request, file_field=FILE, header_prefix=HEADER_PREFIX)
    upload, fields = await asyncio.to_thread(read_upload, received)
    parsed_s = time.perf_counter()
    info = await engine.control.load_adapter(upload, model=fields.model)
    tell_ignored(response, fields.model_extra or ())
    return uploaded(info, timings(received, parsed_s))


@routes.get("/v1/adapters")
async def list_adapters(engine: EngineDep) -> AdapterList:
    """The loaded adapters of all models."""
    return AdapterList(object="list", data=[card(info) for info in await engine.control.look()])


@routes.get("/v1/adapters/{name:path}")
async def retrieve_adapter(name: str, engine: EngineDep) -> AdapterCard:
    """One adapter."""
    for info in await engine.control.look():
        if info.name == name:
            return card(info)
    raise NotFoundError(f"The adapter {name!r} is not loaded.", param="name")


@routes.delete("/v1/adapters/{name:path}")
async def delete_adapter(name: str, engine: EngineDep) -> DeletedAdapter:
    """Admit no more requests of an adapter; those that run end with it."""
    info = await engine.control.unload_adapter(name)
    return DeletedAdapter(object="adapter", name=info.name, deleted=True)


@routes.post("/v1/load_lora_adapter", short=False, response_class=PlainTextResponse)
async def load_lora_adapter(body: LoadLora, engine: EngineDep) -> Response:
    """vLLM's: serve an adapter from a folder; a name that is taken needs ``load_inplace``."""
    await _load(engine, body, replaces=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@routes.post("/v1/unload_lora_adapter", short=False, response_class=PlainTextResponse)
async def unload_lora_adapter(body: UnloadLora, engine: EngineDep) -> Response:
    """vLLM's: admit no more requests of an adapter."""
    await engine.control.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@routes.post("/load_lora_adapter", short=False, dialect=SGLANG)
@routes.post("/update_weights_from_lora", short=False, dialect=SGLANG)
async def put_lora_adapter(body: LoadLora, engine: EngineDep) -> LoraAnswer:
    """SGLang's and prime-rl's: serve an adapter from a folder, in place of one of this name."""
    await _load(engine, body, replaces=True)
    if body.flush_cache:
        await engine.control.reset_prefix_cache()
    return _answer(engine)


@routes.post(
    "/load_lora_adapter_from_tensors",
    short=False,
    dialect=SGLANG,
    body_limit=ADAPTER,
    openapi_extra=serialized_schema(LoraTensors),
    response_model=LoraAnswer,
)
async def put_lora_tensors(request: Request, engine: EngineDep, response: Response) -> object:
    """SGLang's: serve an adapter of the body, as safetensors only, in place of one of this name."""
    received = await receive(request, file_field=FILE, header_prefix=HEADER_PREFIX)
    upload, fields = await asyncio.to_thread(read_serialized, received)
    await engine.control.load_adapter(upload, model=fields.base_model_name)
    tell_ignored(response, set(fields.model_extra or ()) - fields.without_effect)
    return _answer(engine)


@routes.post("/unload_lora_adapter", short=False, dialect=SGLANG)
async def drop_lora_adapter(body: UnloadLora, engine: EngineDep) -> LoraAnswer:
    """SGLang's: admit no more requests of an adapter."""
    await engine.control.unload_adapter(body.lora_name)
    return _answer(engine)


async def _load(engine: EngineClient, body: LoadLora, *, replaces: bool) -> None:
    refuse_3d_weights(body.is_3d_lora_weight)
    await engine.control.load_adapter_folder(
        body.lora_name,
        body.lora_path,
        model=body.base_model_name,
        version=body.version,
        expected_version=body.expected_version,
        replaces=replaces,
        is_pinned=body.pinned,
    )


def _answer(engine: EngineClient) -> LoraAnswer:
    loaded = loaded_adapters(engine.control.adapters())
    return LoraAnswer(success=True, error_message="", loaded_adapters=loaded)
