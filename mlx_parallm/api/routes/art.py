"""ART's routes: what this server can do for it, and adapters that are replaced in flight."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request

from mlx_parallm.api.auth import CONTROL, require_admin
from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.api.in_flight.update import update_in_flight
from mlx_parallm.api.json_body import JsonRoute
from mlx_parallm.api.schemas.art import (
    PROTOCOL_VERSION,
    ArtCapabilities,
    InFlightUpdate,
    InFlightUpdated,
)

router = APIRouter(route_class=JsonRoute, prefix="/art")


@router.get("/capabilities")
async def art_capabilities() -> ArtCapabilities:
    """The features of ART's serving protocol that are served."""
    return ArtCapabilities(
        runtime="art_vllm",
        protocol_version=PROTOCOL_VERSION,
        binary_routed_experts=False,
        fast_metrics=None,
        inplace_lora_load=True,
        in_flight_lora_updates=True,
        policy_token_spans=True,
    )


@router.post("/in_flight_lora_update", dependencies=[Depends(require_admin)], tags=[CONTROL])
async def in_flight_lora_update(
    body: InFlightUpdate, request: Request, engine: EngineDep
) -> InFlightUpdated:
    """Replace an adapter while requests generate with it; their spans show where."""
    return await update_in_flight(body, engine.control, request.app.state.policies)
