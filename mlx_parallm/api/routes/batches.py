"""``/v1/batches``: files of requests that are answered in the background."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.routing import Match

from mlx_parallm.api.convert.batches import batch_object, list_object
from mlx_parallm.api.dependencies import BatchesDep, ClientDep
from mlx_parallm.api.json_body import JsonRoute
from mlx_parallm.api.schemas.batches import BatchRequest
from mlx_parallm.batch_jobs.service import BatchOrder
from mlx_parallm.types.errors import InvalidRequestError

router = APIRouter(route_class=JsonRoute)

#: Routes whose requests may stand in a batch, where the application has them.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/decisions",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/v1/rewards/score",
)


@router.post("/batches")
async def create_batch(
    body: BatchRequest, request: Request, client: ClientDep, batches: BatchesDep
) -> dict[str, Any]:
    """Begin to answer the lines of a file."""
    served = endpoints_of(request.app)
    if body.endpoint not in served:
        raise InvalidRequestError(
            f"The endpoint must be one of {', '.join(served)}.", param="endpoint"
        )
    expiry = body.output_expires_after
    order = BatchOrder(
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        metadata=body.metadata,
        output_expires_after_s=expiry.seconds if expiry is not None else None,
    )
    return batch_object(await batches.create(client, order))


@router.get("/batches")
async def list_batches(
    client: ClientDep,
    batches: BatchesDep,
    after: Annotated[str | None, Query(pattern="^batch_")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """The caller's batches, newest first; ``after`` is the last id of the page before."""
    records, has_more = batches.list(client, after=after, limit=limit)
    return list_object([batch_object(one) for one in records], has_more)


@router.get("/batches/{batch_id}")
async def retrieve_batch(batch_id: str, client: ClientDep, batches: BatchesDep) -> dict[str, Any]:
    """How far a batch is."""
    return batch_object(batches.get(batch_id, client))


@router.post("/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, client: ClientDep, batches: BatchesDep) -> dict[str, Any]:
    """End a batch; what is answered already becomes its output."""
    return batch_object(await batches.cancel(batch_id, client))


def endpoints_of(app: FastAPI) -> list[str]:
    """The endpoints of ``ENDPOINTS`` that an application has."""
    return [path for path in ENDPOINTS if _has_route(app, path)]


def _has_route(app: FastAPI, path: str) -> bool:
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)
