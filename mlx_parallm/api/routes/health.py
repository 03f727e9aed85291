"""``GET /health``, ``/version``, ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter, Response

from mlx_parallm import __version__
from mlx_parallm.api.dependencies import EngineDep

router = APIRouter()


@router.get("/health")
async def health(engine: EngineDep) -> Response:
    """200 with no body while the engine lives; 503 with the reason when it does not."""
    engine.check_health()
    return Response(status_code=200)


@router.get("/version")
async def version() -> dict[str, str]:
    """This server's version."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(engine: EngineDep) -> Response:
    """Prometheus metrics under vLLM's names."""
    body, content_type = engine.render_metrics()
    return Response(body, headers={"content-type": content_type})
