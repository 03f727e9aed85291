"""Files and batches in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictInt, StrictStr

from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.batch_jobs.records import BatchRecord, FileRecord, State
from mlx_parallm.batch_jobs.uploads import MAX_PARTS, PartedUpload
from mlx_parallm.types.errors import InvalidRequestError

DAY_S = 24 * 3600
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * DAY_S

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]


class ExpiresAfter(BaseModel):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: StrictInt = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class UploadFields(BaseModel):
    """The fields of an upload besides its file."""

    purpose: Purpose = Field(description="What the file is for.")
    expires_after_anchor: Literal["created_at"] | None = Field(
        None, alias="expires_after[anchor]", description="The moment from which the time counts."
    )
    expires_after_seconds: int | None = Field(
        None,
        alias="expires_after[seconds]",
        ge=MIN_EXPIRY_S,
        le=MAX_EXPIRY_S,
        description="When the file expires; by default, a file for a batch expires after 30 days.",
    )


def file_object(record: FileRecord) -> dict[str, Any]:
    """Return the description of a file."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


class CreateUpload(NullIsAbsent):
    """A file that is to come in parts."""

    filename: StrictStr = Field(min_length=1, description="The name of the file.")
    purpose: Purpose = Field(description="What the file is for.")
    num_bytes: StrictInt = Field(
        alias="bytes", ge=1, description="The bytes of all its parts together."
    )
    mime_type: StrictStr | None = Field(None, description="Its type; it has no effect.")
    expires_after: ExpiresAfter | None = Field(
        None, description="When the file expires; by default, one for a batch after 30 days."
    )

    @property
    def expires_after_s(self) -> int | None:
        """After how many seconds the file expires; None: never."""
        expiry = self.expires_after
        return file_expiry_s(None if expiry is None else expiry.seconds, self.purpose)


class CompleteUpload(NullIsAbsent):
    """The parts of a file."""

    part_ids: Annotated[list[StrictStr], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_PARTS, description="Ids of the parts in their order."
    )
    md5: StrictStr | None = Field(None, description="The MD5 of the file in hexadecimal digits.")


def file_expiry_s(wanted_s: int | None, purpose: str) -> int | None:
    """Return after how many seconds a file expires; None: never, which no batch's file may."""
    return MAX_EXPIRY_S if wanted_s is None and purpose == "batch" else wanted_s


def upload_object(upload: PartedUpload) -> dict[str, Any]:
    """Return the description of an upload in parts."""
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.num_bytes,
        "created_at": upload.created_at,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "expires_at": upload.expires_at,
        "file": None if upload.file is None else file_object(upload.file),
    }


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """Return the description of a batch; output files appear once they are complete."""
    has_ended = record.has_ended
    errors = record.errors
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": errors} if errors is not None else None,
        "input_file_id": record.input_file_id,
        "completion_window": "24h",
        "status": record.status,
        "output_file_id": record.output_file_id if has_ended else None,
        "error_file_id": record.error_file_id if has_ended else None,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{
            f"{state}_at": getattr(record, f"{state}_at")
            for state in State
            if state is not State.VALIDATING
        },
        "request_counts": {
            "total": record.total,
            "completed": record.completed,
            "failed": record.failed,
        },
        "usage": record.usage,
        "metadata": record.metadata,
    }


def page_of(
    items: Sequence[dict[str, Any]], *, after: str | None, limit: int, descending: bool, kind: str
) -> tuple[Sequence[dict[str, Any]], bool]:
    """Return a page of items that are in memory, and True if more follow.

    Args:
        items: all of them, in their order.
        after: the last id of the page before; None: the first page.
        limit: most items.
        descending: True for the last ones first.
        kind: of the items, for errors.

    Raises:
        InvalidRequestError: there is no item ``after``.
    """
    ordered = items[::-1] if descending else items
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidRequestError(f"There is no {kind} {after[:128]!r}.", param="after")
        ordered = ordered[places[0] + 1 :]
    return ordered[:limit], len(ordered) > limit


def list_object(objects: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return a page of a list."""
    return {
        "object": "list",
        "data": list(objects),
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }
