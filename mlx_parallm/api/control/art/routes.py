"""ART's routes: capabilities, and adapters that are replaced in flight."""

from __future__ import annotations

from fastapi import Request

from mlx_parallm.api.control.art.schema import (
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
    """Return the features of ART's serving protocol that this server has."""
    return ArtCapabilities()


@routes.post("/art/in_flight_lora_update", access=Access.ADMIN)
async def in_flight_lora_update(
    body: InFlightUpdate, request: Request, engine: EngineDep
) -> InFlightUpdated:
    """Replace an adapter while requests generate with it; spans show which tokens it made."""
    return await update_in_flight(body, engine.control, request.app.state.policies)
