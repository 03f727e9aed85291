"""``GET /health``, ``/ping``, ``/load``, ``/version``, ``/metrics``."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import PlainTextResponse

from mlx_parallm import __version__
from mlx_parallm.api.control.server.schema import LoadResponse
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes

routes = Routes(SERVER, access=Access.OPEN)


@routes.get("/health", is_polled=True, response_class=Response)
async def health(engine: EngineDep) -> Response:
    """200 with no body while requests are admitted; 503 with the reason when they are not.

    They are not once the engine is dead, or the server has been told to stop: what is behind a
    proxy or a load balancer must get no new requests while it ends those that run.
    """
    engine.check_open()
    return Response(status_code=200)


@routes.get("/ping", is_polled=True, response_class=Response)
@routes.post("/ping", is_polled=True, response_class=Response)
async def ping(engine: EngineDep) -> Response:
    """The same as ``/health``, under SageMaker's name."""
    engine.check_open()
    return Response(status_code=200)


@routes.get("/load", is_polled=True)
async def load(engine: EngineDep) -> LoadResponse:
    """How busy the server is; ``server_load`` is vLLM's field."""
    now = await engine.load()
    return LoadResponse(
        server_load=now.num_requests,
        num_running=now.num_running,
        num_waiting=now.num_waiting,
    )


@routes.get("/version")
async def version() -> dict[str, str]:
    """This server's version."""
    return {"version": __version__}


@routes.get("/metrics", is_polled=True, response_class=PlainTextResponse)
async def metrics(engine: EngineDep) -> Response:
    """Prometheus metrics under vLLM's names."""
    body, content_type = await engine.render_metrics()
    return Response(body, headers={"content-type": content_type})
