"""Bodies and objects of ``/v1/messages/batches``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from mlx_parallm.api.http.declared import V1
from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.batch_jobs.lines import MAX_LINES
from mlx_parallm.batch_jobs.records import BatchRecord, State
from mlx_parallm.types.errors import InvalidRequestError

ENDPOINT = f"{V1}/messages"
PATH = f"{ENDPOINT}/batches"
# KEPT_S: how long results are kept.
KEPT_S = 29 * 24 * 3600


class BatchedMessage(BaseModel):
    """A request of a batch."""

    model_config = ConfigDict(extra="ignore")

    custom_id: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = Field(
        description="Up to 64 letters, digits, - and _, which no other request of the batch has."
    )
    params: dict[str, Any] = Field(
        description="A body of `POST /v1/messages`, which is checked when it is answered."
    )


class CreateMessageBatch(NullIsAbsent):
    """Requests that are answered in the background."""

    requests: Annotated[list[BatchedMessage], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_LINES, description="The requests."
    )

    def check(self) -> None:
        """Refuse ids that are there twice, and streams.

        Raises:
            InvalidRequestError: names the request.
        """
        counts = Counter(request.custom_id for request in self.requests)
        for number, request in enumerate(self.requests):
            where = f"requests.{number}"
            if counts[request.custom_id] > 1:
                raise InvalidRequestError(
                    f"{where}.custom_id is that of another request, too.",
                    param=f"{where}.custom_id",
                )
            if request.params.get("stream"):
                raise InvalidRequestError(
                    f"{where}.params.stream: a batch cannot stream.",
                    param=f"{where}.params.stream",
                )


class RequestCounts(BaseModel):
    """Numbers of requests; all are ``processing`` until the batch has ended."""

    processing: int = Field(description="Not ended.")
    succeeded: int = Field(description="Answered.")
    errored: int = Field(description="Refused, or failed.")
    canceled: int = Field(description="Not answered when the batch was cancelled.")
    expired: int = Field(description="Not answered when its time was over.")


class MessageBatch(BaseModel):
    """A batch of messages; its times are RFC 3339."""

    id: str = Field(description="Begins with msgbatch_.")
    type: Literal["message_batch"] = Field(default="message_batch", description="What this is.")
    processing_status: Literal["in_progress", "canceling", "ended"] = Field(
        description="Results are there once it is ended."
    )
    request_counts: RequestCounts = Field(description="Its requests.")
    created_at: str = Field(description="When it was made.")
    expires_at: str = Field(description="When requests that are not answered expire.")
    ended_at: str | None = Field(description="When it ended.")
    cancel_initiated_at: str | None = Field(description="When it was cancelled.")
    archived_at: str | None = Field(description="When its results were removed.")
    results_url: str | None = Field(description="Where its results are, once it has ended.")


class MessageBatchPage(BaseModel):
    """A page of a list, newest first."""

    data: list[MessageBatch] = Field(description="The batches.")
    has_more: bool = Field(description="True if more follow.")
    first_id: str | None = Field(description="The first id.")
    last_id: str | None = Field(description="The last id.")


class DeletedMessageBatch(BaseModel):
    """A batch that is gone."""

    id: str = Field(description="Its id.")
    type: Literal["message_batch_deleted"] = Field(
        default="message_batch_deleted", description="What this is."
    )


def message_batch(record: BatchRecord, url: str, now: float) -> MessageBatch:
    """Return a batch in Anthropic's form; ``url`` is this server's, ``now`` in Unix seconds."""
    ended_at = next(
        (
            moment
            for moment in (
                record.completed_at,
                record.failed_at,
                record.expired_at,
                record.cancelled_at,
            )
            if moment is not None
        ),
        None,
    )
    is_archived = ended_at is not None and now >= ended_at + KEPT_S
    has_results = ended_at is not None and not is_archived
    return MessageBatch(
        id=record.id,
        processing_status=_status(record),
        request_counts=_counts(record),
        created_at=_time(record.created_at),
        expires_at=_time(record.expires_at),
        ended_at=_optional_time(ended_at),
        cancel_initiated_at=_optional_time(record.cancelling_at),
        archived_at=_time(ended_at + KEPT_S) if ended_at is not None and is_archived else None,
        results_url=f"{url}{PATH}/{record.id}/results" if has_results else None,
    )


def message_batch_page(batches: Sequence[MessageBatch], has_more: bool) -> MessageBatchPage:
    """Return a page of a list."""
    first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
    return MessageBatchPage(data=list(batches), has_more=has_more, first_id=first, last_id=last)


def _status(record: BatchRecord) -> Literal["in_progress", "canceling", "ended"]:
    if record.has_ended:
        return "ended"
    return "canceling" if record.status == State.CANCELLING else "in_progress"


def _counts(record: BatchRecord) -> RequestCounts:
    """Return the counts, which show nothing of a batch that goes on, as at Anthropic."""
    counts = dict.fromkeys(RequestCounts.model_fields, 0)
    if not record.has_ended:
        return RequestCounts(**counts | {"processing": record.total})
    if record.status == State.FAILED:
        return RequestCounts(**counts | {"errored": record.total})
    counts["succeeded"] = record.completed
    counts["errored"] = record.failed - record.unanswered
    unanswered = record.total - counts["succeeded"] - counts["errored"]
    left = "canceled" if record.status == State.CANCELLED else "expired"
    return RequestCounts(**counts | {left: unanswered})


def _optional_time(seconds: int | None) -> str | None:
    return None if seconds is None else _time(seconds)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
