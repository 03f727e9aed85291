"""A model's own weights while the server runs, in this server's, vLLM's and SGLang's words."""

from __future__ import annotations

import asyncio
import time

from fastapi import Request, Response

from mlx_parallm.api.control.pause.schema import MessageAnswer, PausedGeneration
from mlx_parallm.api.control.tensors import serialized_schema, timings, upload_schema
from mlx_parallm.api.control.weights.request import (
    FILE,
    NO_TRANSFER,
    checksums,
    compared,
    read_serialized,
    read_update,
)
from mlx_parallm.api.control.weights.schema import (
    CheckedWeights,
    CheckWeights,
    FinishUpdate,
    NewVersion,
    NewVersionAnswer,
    TensorFields,
    UpdatedWeights,
    UpdateFields,
    UpdateFromDisk,
    WeightInfo,
)
from mlx_parallm.api.http.declared import WEIGHTS, Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.ignored import tell_ignored
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.uploads import receive
from mlx_parallm.api.sglang.dialect import SGLANG
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError, NotImplementedRouteError

routes = Routes(SERVER, access=Access.ADMIN)

HEADER_PREFIX = "x-weights-"


@routes.post(
    "/update_weights",
    body_limit=WEIGHTS,
    openapi_extra=upload_schema(UpdateFields, FILE, needs_file=False),
    response_model=UpdatedWeights,
)
async def update_weights(request: Request, engine: EngineDep, response: Response) -> object:
    """Replace weights between two steps: tensors of the body, or a folder's whole checkpoint."""
    received = await receive(request, file_field=FILE, header_prefix=HEADER_PREFIX)
    fields, tensors = await asyncio.to_thread(read_update, received)
    parsed_s = time.perf_counter()
    if fields.weight_dir is not None:
        with named_by({"path": "weight_dir"}):
            version = await engine.control.update_weights_from_folder(
                fields.weight_dir,
                model=fields.model,
                version=fields.version,
                expected_version=fields.expected_version,
            )
    else:
        update = WeightsUpdate(
            tensors=tensors, version=fields.version, expected_version=fields.expected_version
        )
        version = await engine.control.update_weights(update, model=fields.model)
    tell_ignored(response, set(fields.model_extra or ()) - fields.without_effect)
    return UpdatedWeights(
        status="ok",
        message="Weights updated",
        weight_version=version.label,
        timings=timings(received, parsed_s),
    )


@routes.post("/update_weights_from_disk", dialect=SGLANG)
async def update_from_disk(body: UpdateFromDisk, engine: EngineDep) -> PausedGeneration:
    """SGLang's: replace all weights by those of a folder."""
    await _abort_all(engine, body.abort_all_requests)
    paused = (await engine.load()).num_requests if engine.control.is_paused else 0
    with named_by({"path": "model_path"}):
        await engine.control.update_weights_from_folder(
            body.model_path, version=body.weight_version
        )
    return PausedGeneration(
        success=True, message="Weights updated.", status="ok", num_paused_requests=paused
    )


@routes.post(
    "/update_weights_from_tensor",
    body_limit=WEIGHTS,
    dialect=SGLANG,
    openapi_extra=serialized_schema(TensorFields, needs_file=False),
    response_model=MessageAnswer,
)
async def update_from_tensor(request: Request, engine: EngineDep, response: Response) -> object:
    """SGLang's: replace weights by tensors of the body, as safetensors only."""
    received = await receive(request, file_field=FILE, header_prefix=HEADER_PREFIX)
    fields, tensors = await asyncio.to_thread(read_serialized, received)
    await _abort_all(engine, fields.abort_all_requests)
    update = WeightsUpdate(tensors=tensors, version=fields.weight_version)
    await engine.control.update_weights(update)
    tell_ignored(response, set(fields.model_extra or ()) - fields.without_effect)
    return MessageAnswer(success=True, message="Weights updated.", status="ok")


@routes.post("/start_weight_update")
@routes.post("/begin_weight_update", include_in_schema=False)
async def start_weight_update() -> MessageAnswer:
    """VLLM's and SGLang's: nothing needs to be prepared."""
    return MessageAnswer(success=True, message="Weight update started", status="ok")


@routes.post("/finish_weight_update")
@routes.post("/end_weight_update", include_in_schema=False)
async def finish_weight_update(
    engine: EngineDep, body: FinishUpdate | None = None
) -> MessageAnswer:
    """vLLM's: what was updated serves already; it is given a label."""
    if body is not None and body.weight_version is not None:
        await engine.control.set_version(body.weight_version)
    return MessageAnswer(success=True, message="Weight update finished", status="ok")


@routes.post("/update_weight_version", dialect=SGLANG)
async def update_weight_version(body: NewVersion, engine: EngineDep) -> NewVersionAnswer:
    """VLLM's and SGLang's: call the weights something else, from the next token on."""
    await _abort_all(engine, body.abort_all_requests)
    version = await engine.control.set_version(body.new_version)
    return NewVersionAnswer(success=True, message="Version updated.", new_version=version.label)


@routes.get("/weight_info")
@routes.get("/get_weight_version")
async def weight_info(engine: EngineDep) -> WeightInfo:
    """VLLM's and slime's: the version of the first model, and those of all adapters."""
    control = engine.control
    return WeightInfo(
        weight_version=control.version().label,
        adapters={info.name: info.version for info in control.adapters()},
    )


@routes.post("/weight_checker")
@routes.post("/weights_checker", dialect=SGLANG)
async def check_weights(body: CheckWeights, request: Request, engine: EngineDep) -> CheckedWeights:
    """VLLM's and SGLang's: SHA-256 of every tensor, or which are others than before."""
    if body.action.startswith("reset"):
        raise NotImplementedRouteError("This server cannot reset weights; update them instead.")
    state = request.app.state
    baseline = body.baseline or getattr(state, "weights_snapshot", None)
    if body.action == "compare" and baseline is None:
        raise InvalidRequestError("compare needs a baseline or a snapshot.", param="baseline")
    current = dict(await engine.control.checksums())
    if body.action == "compare":
        return compared(current, baseline or {})
    if body.action == "snapshot":
        state.weights_snapshot = current
    return checksums(current)


@routes.post("/init_weight_transfer_engine")
@routes.post("/start_draft_weight_update", include_in_schema=False)
@routes.post("/init_weights_update_group", dialect=SGLANG)
@routes.post("/destroy_weights_update_group", dialect=SGLANG)
@routes.post("/update_weights_from_distributed", dialect=SGLANG)
@routes.post("/update_weights_from_ipc", dialect=SGLANG)
@routes.post("/collective_rpc")
async def refuse_transfer(request: Request) -> None:
    """What other servers do between GPUs: 501 that names the alternative."""
    raise NotImplementedRouteError(NO_TRANSFER.format(what=request.url.path))


async def _abort_all(engine: EngineClient, is_wanted: bool) -> None:
    if is_wanted:
        for each in engine.open_requests():
            await engine.cancel(each.request_id)
