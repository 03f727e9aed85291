"""Replacing a model's weights while the server runs: this server's, vLLM's and SGLang's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import Annotated, NamedTuple

from fastapi import Query, Request, Response

from mlx_parallm.adapters.safetensors import MODEL_DTYPES, read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.api.control.pause.schema import MessageAnswer, PausedGeneration
from mlx_parallm.api.control.weights.schema import (
    CheckedWeights,
    CheckWeights,
    FinishUpdate,
    Name,
    NewVersion,
    NewVersionAnswer,
    TensorFields,
    UpdatedWeights,
    UpdateFields,
    UpdateFromDisk,
    WeightInfo,
)
from mlx_parallm.api.control.weights.tensors import (
    serialized_schema,
    take_serialized,
    timings,
    unpacked,
    upload_schema,
)
from mlx_parallm.api.http.declared import WEIGHTS, Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.dialect import SGLANG
from mlx_parallm.api.http.json_body import tell_ignored
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.uploads import (
    BodyDigest,
    Received,
    is_json,
    json_object,
    receive,
    validated,
)
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError, NotImplementedRouteError
from mlx_parallm.types.request import GenerateRequest, WeightsVersion

FILE = "weights"
NO_TRANSFER = (
    "{what} is not served: tensors do not come by NCCL or CUDA IPC here. Send them as a "
    "safetensors body to /update_weights (an adapter's to /v1/update_adapter_weights), or name "
    "a folder."
)
routes = Routes(SERVER, access=Access.ADMIN)

HEADER_PREFIX = "x-weights-"


class Tensors(NamedTuple):
    """Tensors by name, and the digest of the files that they came in, once it is known."""

    by_name: dict[str, HostTensor]
    digest: Future[str | None]


def read_update(received: Received, hashing: BodyDigest) -> tuple[UpdateFields, Tensors | None]:
    """Return fields and tensors of ``/update_weights``; None for tensors if it names a folder.

    It takes long, so it runs on a thread of its own.

    Raises:
        NotImplementedRouteError: the body announces tensors that would come another way.
        InvalidRequestError: a field is wrong, the tensors are no safetensors file, or there are
            neither tensors nor a folder.
    """
    fields, data, param = unpacked(received, FILE, needs_file=False)
    if is_json(received.kind) and "update_info" in fields:
        raise NotImplementedRouteError(NO_TRANSFER.format(what="update_info"))
    known = validated(UpdateFields, fields)
    if (data is None) == (known.weight_dir is None):
        raise InvalidRequestError(
            "Give either tensors or weight_dir, not both.", param="weight_dir"
        )
    if data is None:
        return known, None
    digest = hashing.finish(data)
    return known, Tensors(read_safetensors(data, param=param, dtypes=MODEL_DTYPES), digest)


def read_serialized(received: Received, hashing: BodyDigest) -> tuple[TensorFields, Tensors]:
    """Return fields and tensors of SGLang's ``/update_weights_from_tensor``; see ``read_update``.

    Raises:
        InvalidRequestError: a field is wrong, or the tensors are; see ``take_serialized``.
    """
    fields = json_object(received.body)
    tensors, files = take_serialized(fields, dtypes=MODEL_DTYPES)
    return validated(TensorFields, fields), Tensors(tensors, hashing.finish(*files))


def checksums(by_name: dict[str, str]) -> CheckedWeights:
    """Return the answer with each tensor's checksum."""
    return CheckedWeights(message=f"{len(by_name)} tensors.", checksums=by_name)


def compared(current: Mapping[str, str], baseline: Mapping[str, str]) -> CheckedWeights:
    """Return the answer with the tensors that differ from the baseline."""
    names = sorted(current.keys() | baseline.keys())
    other = [name for name in names if current.get(name) != baseline.get(name)]
    message = f"{len(other)} of {len(names)} tensors differ."
    return CheckedWeights(message=message, match=not other, mismatches=other)


@routes.post(
    "/update_weights",
    body_limit=WEIGHTS,
    openapi_extra=upload_schema(UpdateFields, FILE, needs_file=False),
    response_model=UpdatedWeights,
)
async def update_weights(request: Request, engine: EngineDep, response: Response) -> object:
    """Replace weights between two steps, by tensors of the body or by a folder's checkpoint."""
    with closing(BodyDigest()) as hashing:
        received = await receive(
            request, file_field=FILE, header_prefix=HEADER_PREFIX, hashing=hashing
        )
        fields, tensors = await asyncio.to_thread(read_update, received, hashing)
        parsed_s = time.perf_counter()
        version = await _replaced(engine, fields, tensors)
    tell_ignored(response, set(fields.model_extra or ()) - fields.without_effect)
    took = timings(received, parsed_s)
    return UpdatedWeights(message="Weights updated", weight_version=version.label, timings=took)


async def _replaced(
    engine: EngineClient, fields: UpdateFields, tensors: Tensors | None
) -> WeightsVersion:
    """Replace weights by tensors, or by the folder that the fields name."""
    if tensors is None:
        assert fields.weight_dir is not None
        with named_by({"path": "weight_dir"}):
            return await engine.control.update_weights_from_folder(
                fields.weight_dir,
                model=fields.model,
                version=fields.version,
                expected_version=fields.expected_version,
            )
    update = WeightsUpdate(
        tensors=tensors.by_name,
        version=fields.version,
        expected_version=fields.expected_version,
    )
    return await engine.control.update_weights(update, model=fields.model, digest=tensors.digest)


@routes.post("/update_weights_from_disk", dialect=SGLANG)
async def update_from_disk(body: UpdateFromDisk, engine: EngineDep) -> PausedGeneration:
    """Replace all weights by those of a folder (SGLang)."""
    await _abort_all(engine, body.abort_all_requests)
    paused = (await engine.load()).num_requests if engine.control.is_paused else 0
    with named_by({"path": "model_path"}):
        await engine.control.update_weights_from_folder(
            body.model_path, version=body.weight_version
        )
    return PausedGeneration(message="Weights updated.", num_paused_requests=paused)


@routes.post(
    "/update_weights_from_tensor",
    body_limit=WEIGHTS,
    dialect=SGLANG,
    openapi_extra=serialized_schema(TensorFields, needs_file=False),
    response_model=MessageAnswer,
)
async def update_from_tensor(request: Request, engine: EngineDep, response: Response) -> object:
    """Replace weights by safetensors in the body (SGLang)."""
    with closing(BodyDigest()) as hashing:
        received = await receive(request, file_field=FILE, header_prefix=HEADER_PREFIX)
        fields, tensors = await asyncio.to_thread(read_serialized, received, hashing)
        await _abort_all(engine, fields.abort_all_requests)
        update = WeightsUpdate(tensors=tensors.by_name, version=fields.weight_version)
        await engine.control.update_weights(update, digest=tensors.digest)
    tell_ignored(response, set(fields.model_extra or ()) - fields.without_effect)
    return MessageAnswer(message="Weights updated.")


@routes.post("/start_weight_update")
@routes.post("/begin_weight_update", include_in_schema=False)
async def start_weight_update() -> MessageAnswer:
    """Do nothing (vLLM, SGLang): an update needs no preparation."""
    return MessageAnswer(message="Weight update started")


@routes.post("/finish_weight_update")
@routes.post("/end_weight_update", include_in_schema=False)
async def finish_weight_update(
    engine: EngineDep, body: FinishUpdate | None = None
) -> MessageAnswer:
    """Label the updated weights, which are in use already (vLLM)."""
    if body is not None and body.weight_version is not None:
        await engine.control.set_version(body.weight_version)
    return MessageAnswer(message="Weight update finished")


@routes.post("/update_weight_version", dialect=SGLANG)
async def update_weight_version(body: NewVersion, engine: EngineDep) -> NewVersionAnswer:
    """Change the label of the weights from the next token on (vLLM, SGLang)."""
    await _abort_all(engine, body.abort_all_requests)
    version = await engine.control.set_version(body.new_version)
    return NewVersionAnswer(message="Version updated.", new_version=version.label)


@routes.get("/weight_info")
@routes.get("/get_weight_version")
async def weight_info(
    engine: EngineDep,
    model: Annotated[Name | None, Query(description="The model; the first by default.")] = None,
) -> WeightInfo:
    """Return the version of a model, and those of all adapters (vLLM, slime)."""
    control = engine.control
    return WeightInfo(
        weight_version=control.version(model).label,
        adapters={info.name: info.version for info in control.adapters()},
    )


@routes.post("/weight_checker")
@routes.post("/weights_checker", dialect=SGLANG)
async def check_weights(body: CheckWeights, request: Request, engine: EngineDep) -> CheckedWeights:
    """Return the SHA-256 of every tensor, or which tensors changed (vLLM, SGLang)."""
    if body.action.startswith("reset"):
        raise NotImplementedRouteError("This server cannot reset weights; update them instead.")
    model = engine.control.first_name(body.model)
    state = request.app.state
    snapshots: Mapping[str, Mapping[str, str]] = getattr(state, "weights_snapshots", {})
    baseline = body.baseline or snapshots.get(model)
    if body.action == "compare" and baseline is None:
        raise InvalidRequestError(
            "compare needs a baseline or a snapshot of this model.", param="baseline"
        )
    current = dict(await engine.control.checksums(model))
    if body.action == "compare":
        return compared(current, baseline or {})
    if body.action == "snapshot":
        state.weights_snapshots = {**snapshots, model: current}
    return checksums(current)


@routes.post("/init_weight_transfer_engine")
@routes.post("/start_draft_weight_update", include_in_schema=False)
@routes.post("/init_weights_update_group", dialect=SGLANG)
@routes.post("/destroy_weights_update_group", dialect=SGLANG)
@routes.post("/update_weights_from_distributed", dialect=SGLANG)
@routes.post("/update_weights_from_ipc", dialect=SGLANG)
@routes.post("/collective_rpc")
async def refuse_transfer(request: Request) -> None:
    """Refuse transfers between GPUs with 501, and name the alternative."""
    raise NotImplementedRouteError(NO_TRANSFER.format(what=request.url.path))


async def _abort_all(engine: EngineClient, is_wanted: bool) -> None:
    if is_wanted:
        for each in engine.open_requests():
            if isinstance(each, GenerateRequest):
                await engine.cancel(each.request_id)
