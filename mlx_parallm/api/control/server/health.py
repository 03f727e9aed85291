"""``GET /health``, ``/ping``, ``/ready``, ``/load``, ``/version``, ``/metrics``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from mlx_parallm import __version__
from mlx_parallm.api.control.server.process_usage import usage_families
from mlx_parallm.api.control.server.schema import LoadResponse, ReadyResponse
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep, OpenEngineDep
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.request_counts import RequestCounts
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.replicas.standing import check_standing
from mlx_parallm.conversations.service import ConversationService
from mlx_parallm.engine.status import Readiness
from mlx_parallm.training.service import TrainingService
from mlx_parallm.types.errors import EngineDeadError

if TYPE_CHECKING:
    from mlx_parallm.replicas.service import Replicas

routes = Routes(SERVER, access=Access.OPEN)


@routes.get("/health", is_polled=True, response_class=Response)
async def health(_engine: OpenEngineDep) -> Response:
    """Answer 200 with no body while requests are admitted, else 503 with the reason.

    It is 503 once the engine is dead or the server is stopping, so that a proxy or load balancer
    sends no new requests while running ones finish.
    """
    return Response(status_code=200)


@routes.get("/ping", is_polled=True, response_class=Response)
@routes.post("/ping", is_polled=True, response_class=Response)
async def ping(_engine: OpenEngineDep) -> Response:
    """Answer as ``/health`` does, under SageMaker's name."""
    return Response(status_code=200)


@routes.get("/ready", is_polled=True)
async def ready(engine: OpenEngineDep, request: Request) -> ReadyResponse:
    """Report how many engines get requests; 503 with the reason if none does.

    With ``--peers`` it is also 503 while this server is not like the rest of its fleet.

    An engine that is started anew counts once it has the weights and adapters of the others. A
    pause does not change the answer, so that the request that ends it reaches the server.
    """
    readiness = engine.readiness()
    num_ready = sum(each is Readiness.READY for each in readiness)
    if not num_ready:
        raise EngineDeadError(f"No engine is ready: 0 of {len(readiness)}.")
    check_standing(request)
    steps_s = [round(step_s, 3) for step_s in engine.steps_s()]
    return ReadyResponse(ready=num_ready, engines=len(readiness), steps_s=steps_s)


@routes.get("/load", is_polled=True)
async def load(engine: EngineDep) -> LoadResponse:
    """Report how busy the server is; ``server_load`` is vLLM's field."""
    now = await engine.load()
    return LoadResponse(
        server_load=now.num_requests,
        num_running=now.num_running,
        num_waiting=now.num_waiting,
    )


@routes.get("/version")
async def version() -> dict[str, str]:
    """Return this server's version."""
    return {"version": __version__}


@routes.get("/metrics", is_polled=True, response_class=PlainTextResponse)
async def metrics(engine: EngineDep, request: Request) -> Response:
    """Return Prometheus metrics under vLLM's names."""
    body, content_type = await engine.render_metrics()
    counts: RequestCounts = request.app.state.counts
    # A process may have thousands of descriptors, and a machine thousands of processes.
    body += _rendered([*counts.families(), *await in_thread(usage_families)])
    training: TrainingService | None = request.app.state.training
    if training is not None:
        body += training.metrics()
    conversations: ConversationService | None = request.app.state.conversations
    if conversations is not None:
        body += _rendered([conversations.family()])
    replicas: Replicas | None = request.app.state.replicas
    if replicas is not None:
        body += _rendered([replicas.family()])
    return Response(body, headers={"content-type": content_type})


class _Collected:
    """Metrics as ``CollectorRegistry`` takes them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """Return them."""
        return self._families


def _rendered(families: Sequence[Metric]) -> bytes:
    """Return metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Collected(families))  # pyright: ignore[reportArgumentType]
    return generate_latest(registry)
