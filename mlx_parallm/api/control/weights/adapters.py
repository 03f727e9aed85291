"""Adapters while the server runs: uploads, lists, and vLLM's and SGLang's routes for folders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import FLOATS, read_safetensors
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.api.control.weights.schema import (
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
from mlx_parallm.api.control.weights.tensors import (
    SERIALIZED,
    UploadTimings,
    serialized_schema,
    take_serialized,
    timings,
    unpacked,
    upload_schema,
)
from mlx_parallm.api.http.declared import ADAPTER, Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.dialect import SGLANG
from mlx_parallm.api.http.json_body import tell_ignored
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.uploads import Received, json_object, receive, validated
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError, NotImplementedRouteError

FILE = "adapter_model"
# NOT_SERVED: SGLang's fields for tokens that the base model lacks, and for checksums of pickles.
NOT_SERVED = ("added_tokens_config", "expected_checksums")
#: Most routes are served with and without ``/v1``.
routes = Routes(SERVER, access=Access.ADMIN, short=True)

HEADER_PREFIX = "x-adapter-"


def read_upload(received: Received) -> tuple[AdapterUpload, AdapterFields]:
    """Return the adapter of a body, and its fields.

    It takes long, so it runs on a thread of its own: every number is checked and hashed.

    Raises:
        InvalidRequestError: a field is missing or wrong, the tensors are no safetensors file, or
            not an adapter.
    """
    fields, data, param = unpacked(received, FILE)
    known = validated(AdapterFields, fields)
    weights = read_adapter(known.config, read_safetensors(data or b"", param=param), param=param)
    return _upload(known.name, weights, known), known


def read_serialized(received: Received) -> tuple[AdapterUpload, LoraTensors]:
    """Return the adapter of SGLang's ``/load_lora_adapter_from_tensors``.

    It takes as long as ``read_upload``.

    Raises:
        InvalidRequestError: a field is wrong or not supported, or the tensors are wrong; see
            ``take_serialized``.
    """
    fields = json_object(received.body)
    tensors, _ = take_serialized(fields, dtypes=FLOATS)
    for name in NOT_SERVED:
        if fields.pop(name, None):
            raise InvalidRequestError(f"{name} is not supported: leave it out.", param=name)
    known = validated(LoraTensors, fields)
    weights = read_adapter(known.config_dict, tensors, param=SERIALIZED)
    return _upload(known.lora_name, weights, known), known


def _upload(
    name: str, weights: AdapterWeights, fields: AdapterFields | LoraTensors
) -> AdapterUpload:
    # The digest is computed here, so that the engine thread need not do it.
    _ = weights.digest
    return AdapterUpload(
        name=name,
        weights=weights,
        version=fields.version,
        expected_version=fields.expected_version,
        replaces=True,
        is_pinned=fields.pinned,
    )


def refuse_3d_weights(is_3d: bool) -> None:
    """Raise NotImplementedRouteError if an adapter has its experts in vLLM's 3D form."""
    if is_3d:
        raise NotImplementedRouteError(
            "is_3d_lora_weight is not supported: save experts as PEFT or mlx-lm write them."
        )


def card(info: AdapterInfo) -> AdapterCard:
    """Return the description of a loaded adapter."""
    return AdapterCard.model_validate(asdict(info))


def uploaded(info: AdapterInfo, timings: UploadTimings) -> UploadedAdapter:
    """Return the description of an adapter that was just uploaded."""
    return UploadedAdapter.model_validate({**asdict(info), "timings": timings})


def loaded_adapters(infos: Sequence[AdapterInfo]) -> dict[str, str]:
    """Return the loaded adapters in SGLang's form."""
    return {info.name: info.source or info.name for info in infos}


@routes.post(
    "/v1/update_adapter_weights",
    body_limit=ADAPTER,
    openapi_extra=upload_schema(AdapterFields, FILE),
    response_model=UploadedAdapter,
)
async def update_adapter_weights(request: Request, engine: EngineDep, response: Response) -> object:
    """Load an adapter from tensors in the body, or replace a loaded one between two steps.

    If the body is only tensors, the query or headers ``x-adapter-…`` have the fields.
    """
    received = await receive(request, file_field=FILE, header_prefix=HEADER_PREFIX)
    upload, fields = await asyncio.to_thread(read_upload, received)
    parsed_s = time.perf_counter()
    info = await engine.control.load_adapter(upload, model=fields.model)
    tell_ignored(response, fields.model_extra or ())
    return uploaded(info, timings(received, parsed_s))


@routes.get("/v1/adapters")
async def list_adapters(engine: EngineDep) -> AdapterList:
    """List the loaded adapters of all models."""
    return AdapterList(data=[card(info) for info in await engine.control.look()])


@routes.get("/v1/adapters/{name:path}")
async def retrieve_adapter(name: str, engine: EngineDep) -> AdapterCard:
    """Return the description of a loaded adapter."""
    for info in await engine.control.look():
        if info.name == name:
            return card(info)
    raise NotFoundError(f"The adapter {name!r} is not loaded.", param="name")


@routes.delete("/v1/adapters/{name:path}")
async def delete_adapter(name: str, engine: EngineDep) -> DeletedAdapter:
    """Unload an adapter: new requests are refused; running requests finish with it."""
    info = await engine.control.unload_adapter(name)
    return DeletedAdapter(name=info.name)


@routes.post("/v1/load_lora_adapter", short=False, response_class=PlainTextResponse)
async def load_lora_adapter(body: LoadLora, engine: EngineDep) -> Response:
    """Load an adapter from a folder (vLLM). ``load_inplace`` replaces a loaded one."""
    await _load(engine, body, replaces=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@routes.post("/v1/unload_lora_adapter", short=False, response_class=PlainTextResponse)
async def unload_lora_adapter(body: UnloadLora, engine: EngineDep) -> Response:
    """Unload an adapter (vLLM); running requests finish with it."""
    await engine.control.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@routes.post("/load_lora_adapter", short=False, dialect=SGLANG)
@routes.post("/update_weights_from_lora", short=False, dialect=SGLANG)
async def put_lora_adapter(body: LoadLora, engine: EngineDep) -> LoraAnswer:
    """Load an adapter from a folder (SGLang, prime-rl); one with this name is replaced."""
    await _load(engine, body, replaces=True)
    if body.flush_cache:
        await engine.control.reset_prefix_cache(reset_external=False)
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
    """Load an adapter from safetensors in the body (SGLang); one with this name is replaced."""
    received = await receive(request, file_field=FILE, header_prefix=HEADER_PREFIX)
    upload, fields = await asyncio.to_thread(read_serialized, received)
    await engine.control.load_adapter(upload, model=fields.base_model_name)
    tell_ignored(response, set(fields.model_extra or ()) - fields.without_effect)
    return _answer(engine)


@routes.post("/unload_lora_adapter", short=False, dialect=SGLANG)
async def drop_lora_adapter(body: UnloadLora, engine: EngineDep) -> LoraAnswer:
    """Unload an adapter (SGLang); running requests finish with it."""
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
    return LoraAnswer(loaded_adapters=loaded)
