"""``POST /v1/moderations``: not served, and said so in a way that no client retries."""

from __future__ import annotations

from fastapi import APIRouter, Response

from mlx_parallm.api.schemas.errors import ErrorResponse
from mlx_parallm.errors import NotImplementedRouteError

router = APIRouter()


@router.post(
    "/moderations",
    status_code=501,
    responses={501: {"model": ErrorResponse, "description": "No classifier is loaded."}},
)
async def create_moderation() -> Response:
    """501: no loaded model is a classifier."""
    raise NotImplementedRouteError(
        "POST /v1/moderations needs a classifier, and none of the loaded models is one."
    )
