"""The routes of Open Inference Protocol v2.

Names of models may have slashes, so that the first route that fits wins; of the decorators of a
function, the last one adds its route first.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.responses import JSONResponse, Response

from mlx_parallm import __version__
from mlx_parallm.api.http.declared import INPUT, Access
from mlx_parallm.api.http.dependencies import ClientDep, EngineDep, OpenEngineDep, get_requests
from mlx_parallm.api.http.json_body import tell_ignored
from mlx_parallm.api.http.offload import on_body
from mlx_parallm.api.http.openapi import NETS as GROUP
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.nets.oip.answer import infer_response
from mlx_parallm.api.nets.oip.body import HEADER_LENGTH, plain_body, wanted_coding
from mlx_parallm.api.nets.oip.datatypes import DATATYPES
from mlx_parallm.api.nets.oip.dialect import OIP
from mlx_parallm.api.nets.oip.inference import read_inference
from mlx_parallm.api.nets.oip.schema import (
    BINARY,
    VERSION,
    InferResponse,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
    TensorMetadata,
    infer_schema,
)
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.engine.models import name_for
from mlx_parallm.engine.status import Readiness
from mlx_parallm.nets.client import NetClient
from mlx_parallm.nets.kind import NETS
from mlx_parallm.types.errors import EngineDeadError, ModelLoadingError, NotFoundError
from mlx_parallm.types.nets import TensorSpec

routes = Routes(GROUP, dialect=OIP, in_any_process=True)
EXTENSIONS = ["binary_tensor_data", "sequence"]
PLATFORM = "mlx_parallm_net"
# BYTES_PER_NUMBER: length of a number in JSON.
BYTES_PER_NUMBER = 20
INFER: dict[str, Any] = {
    "body_limit": INPUT,
    "openapi_extra": infer_schema(),
    "responses": {200: {"model": InferResponse, "content": {BINARY: {}}}},
}


async def get_nets(request: Request) -> NetClient:
    """Return the nets, as the caller may use them."""
    return NETS.client(await get_requests(request))


NetsDep = Annotated[NetClient, Depends(get_nets)]


@routes.get("/v2", access=Access.OPEN)
async def server_metadata() -> ServerMetadata:
    """Return the server's name, its version and the protocol's extensions."""
    return ServerMetadata(name="mlx_parallm", version=__version__, extensions=EXTENSIONS)


@routes.get("/v2/health/live", access=Access.OPEN, is_polled=True, in_any_process=False)
async def server_live(engine: EngineDep) -> ServerLive:
    """Answer 200 unless the server has to be started again."""
    engine.check_health()
    return ServerLive(live=True)


@routes.get("/v2/health/ready", access=Access.OPEN, is_polled=True, in_any_process=False)
async def server_ready(engine: OpenEngineDep) -> ServerReady:
    """Answer 200 while an engine is ready, else 503 with the reason; a pause changes nothing.

    It is as ``GET /ready``, so that the request that ends a pause reaches the server.
    """
    readiness = engine.readiness()
    if Readiness.READY not in readiness:
        raise EngineDeadError(f"No engine is ready: 0 of {len(readiness)}.")
    return ServerReady(ready=True)


@routes.get("/v2/models/{name:path}/ready", is_polled=True)
@routes.get(
    "/v2/models/{name:path}/versions/{version}/ready", is_polled=True, include_in_schema=False
)
async def model_ready(name: str, nets: NetsDep, version: str = VERSION) -> Response:
    """Answer 200 if the net is loaded, 503 while it loads for the first time."""
    check_version(name, version)
    try:
        nets.get(name)
    except ModelLoadingError:
        return JSONResponse(ModelReady(name=name, ready=False).model_dump(), 503)
    return JSONResponse(ModelReady(name=name, ready=True).model_dump())


@routes.post("/v2/models/{name:path}/infer", **INFER)
@routes.post("/v2/models/{name:path}/versions/{version}/infer", include_in_schema=False, **INFER)
async def infer(
    name: str, request: Request, nets: NetsDep, client: ClientDep, version: str = VERSION
) -> Response:
    """Return the outputs of a net for the rows of its inputs.

    Tensors are numbers in JSON, or bytes behind the object, whose length the header
    ``Inference-Header-Content-Length`` says then. Any content type is taken; bodies may be
    compressed (gzip, deflate), and answers are if ``Accept-Encoding`` names one of these alone.
    """
    check_version(name, version)
    model = nets.get(name)
    raw, header = await plain_body(request), request.headers.get(HEADER_LENGTH)
    request_id = f"infer-{request.state.answer_id}"
    inference = await on_body(
        len(raw),
        lambda: read_inference(model, raw, header, client=client, request_id=request_id),
    )
    coding = wanted_coding(request.headers)

    async def work() -> Response:
        results = await nets.run(inference.request)
        response = await on_body(
            results.num_numbers * BYTES_PER_NUMBER,
            lambda: infer_response(name_for(model, name), inference, results, coding),
        )
        tell_ignored(response, inference.body.ignored)
        return response

    return await unless_disconnected(request, work())


@routes.get("/v2/models/{name:path}")
@routes.get("/v2/models/{name:path}/versions/{version}", include_in_schema=False)
async def model_metadata(name: str, nets: NetsDep, version: str = VERSION) -> ModelMetadata:
    """Return the signature of a net."""
    check_version(name, version)
    model = nets.get(name)
    signature = model.signature
    return ModelMetadata(
        name=name_for(model, name),
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor_metadata(spec) for spec in signature.inputs],
        outputs=[tensor_metadata(spec) for spec in signature.outputs],
    )


def tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    """Return a tensor of a signature in the protocol's words."""
    return TensorMetadata(name=spec.name, datatype=DATATYPES[spec.dtype], shape=list(spec.shape))


def check_version(name: str, version: str) -> None:
    """Raise NotFoundError for any version but the only one."""
    if version != VERSION:
        raise NotFoundError(
            f"The model {name[:64]!r} has no version {version[:64]!r}: each has the version "
            f"{VERSION!r} alone, whose weights may change.",
            param="version",
        )
