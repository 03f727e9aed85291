"""``/v1/batches``: files of requests that are answered in the background."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from pydantic import Field, StrictStr

from mlx_parallm.api.files.schema import ExpiresAfter, batch_object, list_object
from mlx_parallm.api.files.service import BatchesDep
from mlx_parallm.api.http.dependencies import ClientDep
from mlx_parallm.api.http.forms import Metadata, NullIsAbsent
from mlx_parallm.api.http.openapi import FILES
from mlx_parallm.api.http.routing import Routes, declared_routes
from mlx_parallm.batch_jobs.service import BatchOrder
from mlx_parallm.types.errors import InvalidRequestError

routes = Routes(FILES, short=True)


class BatchRequest(NullIsAbsent):
    """A file of requests to be answered in the background."""

    input_file_id: StrictStr = Field(description="A file of the purpose batch.")
    endpoint: StrictStr = Field(description="The path of every line's url.")
    completion_window: Literal["24h"] = Field(description="When the batch expires.")
    metadata: Metadata | None = Field(None, description="Kept with the batch.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When output and error file expire; by default they stay."
    )


@routes.post("/v1/batches")
async def create_batch(
    body: BatchRequest, request: Request, client: ClientDep, batches: BatchesDep
) -> dict[str, Any]:
    """Create a batch, which answers the lines of a file."""
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


@routes.get("/v1/batches")
async def list_batches(
    client: ClientDep,
    batches: BatchesDep,
    after: Annotated[str | None, Query(pattern="^batch_")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """List the caller's batches, newest first; ``after`` is the last id of the previous page."""
    records, has_more = await batches.list(client, after=after, limit=limit)
    return list_object([batch_object(record) for record in records], has_more)


@routes.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, client: ClientDep, batches: BatchesDep) -> dict[str, Any]:
    """Return the state of a batch."""
    return batch_object(await batches.get(batch_id, client))


@routes.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, client: ClientDep, batches: BatchesDep) -> dict[str, Any]:
    """Cancel a batch; its output keeps the answers so far."""
    return batch_object(await batches.cancel(batch_id, client))


def endpoints_of(app: FastAPI) -> list[str]:
    """Return the paths of an application's routes that batches may use."""
    return [route.path for route in declared_routes(app) if route.facts.batchable]
