"""ART's routes: what this server can do for it, and adapters that are replaced in flight."""

from __future__ import annotations

from fastapi import Request

from mlx_parallm.api.control.art.schema import (
    PROTOCOL_VERSION,
    ArtCapabilities,
    InFlightUpdate,
    InFlightUpdated,
)
from mlx_parallm.api.control.art.update import update_in_flight
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import RL
from mlx_parallm.api.http.routing import Routes

routes = Routes(RL)


@routes.get("/art/capabilities")
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


@routes.post("/art/in_flight_lora_update", access=Access.ADMIN)
async def in_flight_lora_update(
    body: InFlightUpdate, request: Request, engine: EngineDep
) -> InFlightUpdated:
    """Replace an adapter while requests generate with it; their spans show where."""
    return await update_in_flight(body, engine.control, request.app.state.policies)
