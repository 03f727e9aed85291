"""``/v1/uploads``: files that come in parts; every client sees its own."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from mlx_parallm.api.files.routes import receive_file
from mlx_parallm.api.files.schema import CompleteUpload, CreateUpload, upload_object
from mlx_parallm.api.files.service import BatchesDep
from mlx_parallm.api.http.declared import PART
from mlx_parallm.api.http.dependencies import ClientDep
from mlx_parallm.api.http.multipart import FormReader, base_name
from mlx_parallm.api.http.openapi import FILES
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.storage.ids import time_of

routes = Routes(FILES, short=True)

DATA_FIELD = "data"
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {DATA_FIELD: {"type": "string", "format": "binary"}},
                    "required": [DATA_FIELD],
                }
            }
        },
    }
}


@routes.post("/v1/uploads")
async def create_upload(
    body: CreateUpload, client: ClientDep, batches: BatchesDep
) -> dict[str, Any]:
    """Begin a file that comes in parts within an hour."""
    uploads = await batches.uploads()
    upload = await uploads.create(
        client,
        filename=base_name(body.filename),
        purpose=body.purpose,
        num_bytes=body.num_bytes,
        expires_after_s=body.expires_after_s,
    )
    return upload_object(upload)


@routes.post("/v1/uploads/{upload_id}/parts", body_limit=PART, openapi_extra=FORM)
async def add_part(
    upload_id: str, request: Request, client: ClientDep, batches: BatchesDep
) -> dict[str, Any]:
    """Add a part to an upload, as a form with ``data``."""
    uploads = await batches.uploads()
    upload = uploads.pending(upload_id, client)
    form = FormReader(request.headers.get("content-type", ""), DATA_FIELD)
    part = await uploads.begin_part()
    try:
        await receive_file(request, form, part, lambda size: uploads.check_part(upload, size))
        part_id = uploads.add_part(upload, part)
    except BaseException:
        part.abandon()
        raise
    return {
        "id": part_id,
        "object": "upload.part",
        "created_at": time_of(part_id, "part_"),
        "upload_id": upload_id,
    }


@routes.post("/v1/uploads/{upload_id}/complete")
async def complete_upload(
    upload_id: str, body: CompleteUpload, client: ClientDep, batches: BatchesDep
) -> dict[str, Any]:
    """Make a file of parts, in the order of their ids."""
    uploads = await batches.uploads()
    return upload_object(await uploads.complete(upload_id, client, body.part_ids, body.md5))


@routes.post("/v1/uploads/{upload_id}/cancel")
async def cancel_upload(upload_id: str, client: ClientDep, batches: BatchesDep) -> dict[str, Any]:
    """Cancel an upload, and remove its parts."""
    uploads = await batches.uploads()
    return upload_object(uploads.cancel(upload_id, client))
