"""``/v1/files``: upload, list, read and delete; every client sees its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from starlette.responses import FileResponse, JSONResponse, Response

from mlx_parallm.api.files.schema import UploadFields, file_expiry_s, file_object, list_object
from mlx_parallm.api.files.service import BatchesDep
from mlx_parallm.api.http.declared import FILE
from mlx_parallm.api.http.dependencies import ClientDep
from mlx_parallm.api.http.multipart import FormReader
from mlx_parallm.api.http.openapi import FILES
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.uploads import validated
from mlx_parallm.batch_jobs.files import FileStore, Upload
from mlx_parallm.batch_jobs.records import FileRecord
from mlx_parallm.storage.disk import in_thread

routes = Routes(FILES, short=True)

FILE_FIELD = "file"
# FORM_SCHEMA describes the form for the documentation: FastAPI does not read it.
FORM_SCHEMA = UploadFields.model_json_schema()
FORM_SCHEMA["properties"][FILE_FIELD] = {"type": "string", "format": "binary"}
FORM_SCHEMA["required"] = [FILE_FIELD, "purpose"]
FORM = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM_SCHEMA}}}
}


@routes.post("/v1/files", body_limit=FILE, openapi_extra=FORM)
async def create_file(request: Request, client: ClientDep, batches: BatchesDep) -> Response:
    """Store a file, as a form with ``file`` and ``purpose``."""
    form = FormReader(request.headers.get("content-type", ""), FILE_FIELD)
    files = await batches.files()
    upload = await files.begin()
    try:
        await receive_file(request, form, upload)
        record = await _store(files, form, upload, client)
    finally:
        upload.abandon()
    return JSONResponse(file_object(record))


@routes.get("/v1/files")
async def list_files(
    client: ClientDep,
    batches: BatchesDep,
    after: Annotated[str | None, Query(pattern="^file-")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> dict[str, Any]:
    """List the caller's files by age; ``after`` is the last id of the previous page."""
    files = await batches.files()
    records, has_more = await files.list(
        client, purpose=purpose, after=after, limit=limit, descending=order == "desc"
    )
    return list_object([file_object(record) for record in records], has_more)


@routes.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, client: ClientDep, batches: BatchesDep) -> dict[str, Any]:
    """Return the description of a file."""
    files = await batches.files()
    return file_object(await files.get(file_id, client))


@routes.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, client: ClientDep, batches: BatchesDep) -> dict[str, Any]:
    """Delete a file, unless a running batch reads it."""
    files = await batches.files()
    await files.delete(file_id, client)
    return {"id": file_id, "object": "file", "deleted": True}


@routes.get("/v1/files/{file_id}/content", response_class=FileResponse)
async def retrieve_content(file_id: str, client: ClientDep, batches: BatchesDep) -> FileResponse:
    """Return the content of a file."""
    files = await batches.files()
    record = await files.get(file_id, client)
    return FileResponse(
        files.path(record),
        media_type="application/octet-stream",
        filename=record.filename,
        headers={"x-content-type-options": "nosniff"},
    )


async def receive_file(
    request: Request,
    form: FormReader,
    upload: Upload,
    check: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the file of a form as it comes; ``check`` may refuse its bytes so far."""
    async for piece in request.stream():
        data = form.feed(piece)
        if data:
            upload.claim(len(data))
            check(upload.num_bytes)
            await in_thread(upload.write, data)
    form.finish()


async def _store(files: FileStore, form: FormReader, upload: Upload, client: str) -> FileRecord:
    fields = validated(UploadFields, form.fields)
    return await files.commit(
        upload,
        owner=client,
        filename=form.filename or FILE_FIELD,
        purpose=fields.purpose,
        expires_after_s=file_expiry_s(fields.expires_after_seconds, fields.purpose),
    )
