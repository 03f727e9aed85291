"""``/v1/messages/batches``: messages that are answered in the background, as Anthropic has them."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Query, Request
from starlette.responses import StreamingResponse

from mlx_parallm.api.anthropic.batch_results import input_lines, result_files, result_lines
from mlx_parallm.api.anthropic.batch_schema import (
    ENDPOINT,
    KEPT_S,
    CreateMessageBatch,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchPage,
    message_batch,
    message_batch_page,
)
from mlx_parallm.api.anthropic.dialect import ANTHROPIC
from mlx_parallm.api.files.schema import MAX_EXPIRY_S
from mlx_parallm.api.files.service import BatchesDep
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import ClientDep
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import FILES
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.batch_jobs.records import MESSAGE_BATCH_PREFIX as PREFIX
from mlx_parallm.batch_jobs.records import BatchRecord
from mlx_parallm.batch_jobs.service import BatchOrder
from mlx_parallm.types.errors import InvalidRequestError, ParallmError

routes = Routes(FILES, dialect=ANTHROPIC, short=True)

Id = Annotated[str | None, Query(pattern=f"^{PREFIX}")]


@routes.post("/v1/messages/batches", body_limit=INPUT)
async def create_message_batch(
    body: CreateMessageBatch, request: Request, client: ClientDep, batches: BatchesDep
) -> MessageBatch:
    """Create a batch of messages, which are answered in the background."""
    await in_thread(body.check)
    files = await batches.files()
    source = await files.put(
        await in_thread(lambda: input_lines(body.requests)),
        owner=client,
        filename="message_batch.jsonl",
        purpose="batch",
        expires_after_s=MAX_EXPIRY_S,
        is_limited=True,
    )
    order = BatchOrder(
        input_file_id=source.id,
        endpoint=ENDPOINT,
        prefix=PREFIX,
        total=len(body.requests),
        output_expires_after_s=KEPT_S,
    )
    try:
        return _described(await batches.create(client, order), request)
    except ParallmError:
        await files.delete(source.id, client)
        raise


@routes.get("/v1/messages/batches")
async def list_message_batches(
    request: Request,
    client: ClientDep,
    batches: BatchesDep,
    after_id: Id = None,
    before_id: Id = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> MessageBatchPage:
    """List the caller's batches of messages, newest first."""
    records, has_more = await batches.list(
        client, prefix=PREFIX, after=after_id, before=before_id, limit=limit
    )
    return message_batch_page([_described(record, request) for record in records], has_more)


@routes.get("/v1/messages/batches/{batch_id}")
async def retrieve_message_batch(
    batch_id: str, request: Request, client: ClientDep, batches: BatchesDep
) -> MessageBatch:
    """Return the state of a batch of messages."""
    return _described(await batches.get(batch_id, client, PREFIX), request)


@routes.post("/v1/messages/batches/{batch_id}/cancel")
async def cancel_message_batch(
    batch_id: str, request: Request, client: ClientDep, batches: BatchesDep
) -> MessageBatch:
    """Cancel a batch of messages; its results keep the answers so far."""
    return _described(await batches.cancel(batch_id, client, PREFIX), request)


@routes.delete("/v1/messages/batches/{batch_id}")
async def delete_message_batch(
    batch_id: str, client: ClientDep, batches: BatchesDep
) -> DeletedMessageBatch:
    """Delete a batch of messages that has ended, with its results."""
    await batches.delete(batch_id, client, PREFIX)
    return DeletedMessageBatch(id=batch_id)


@routes.get("/v1/messages/batches/{batch_id}/results", response_class=StreamingResponse)
async def message_batch_results(
    batch_id: str, client: ClientDep, batches: BatchesDep
) -> StreamingResponse:
    """Return the results of a batch that has ended, a line of JSON for each request."""
    record = await batches.get(batch_id, client, PREFIX)
    if not record.has_ended:
        raise InvalidRequestError(
            "The batch has not ended; its results are there when it has.", param="batch_id"
        )
    files = await batches.files()
    paths = [files.path(await files.get(each, client)) for each in result_files(record)]
    return StreamingResponse(result_lines(record, paths), media_type="application/x-jsonl")


def _described(record: BatchRecord, request: Request) -> MessageBatch:
    return message_batch(record, str(request.base_url).rstrip("/"), time.time())
