"""The records of files and of batches, and the order of the states of a batch.

validating ─▶ in_progress ─▶ finalizing ─▶ completed
│              ├──────▶ finalizing ─▶ expired        (its time is over)
▼              └──────▶ cancelling ─▶ cancelled      (also from validating)
failed                                               (also from each of the others above)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlx_parallm.storage.ids import time_of

COMPLETION_WINDOW_S = 24 * 3600
FILE_PREFIX = "file-"
#: BATCH_PREFIX, MESSAGE_BATCH_PREFIX: of batches that are made and listed in OpenAI's form, and in
#: Anthropic's.
BATCH_PREFIX, MESSAGE_BATCH_PREFIX = "batch_", "msgbatch_"
# CONTENT_NAME: id, owner, purpose and expiry of a content; see ``FileRecord.content_name``.
CONTENT_NAME = re.compile(
    rf"({FILE_PREFIX}[0-9a-f]{{32}})\.([^.]*)\.([^.]*)\.([0-9]*)\.content", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A stored file. Times are Unix seconds; ``owner`` is a digest of an API key."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None

    @property
    def content_name(self) -> str:
        """The name of its content: all that a user needs of the record, if that is lost."""
        expiry = "" if self.expires_at is None else self.expires_at
        return f"{self.id}.{self.owner}.{self.purpose}.{expiry}.content"

    @classmethod
    def of_content(cls, name: str, num_bytes: int) -> FileRecord | None:
        """Return the record of a content that has none; None if this is not its name.

        ``filename`` is lost, and is the id then.
        """
        if not (parts := CONTENT_NAME.fullmatch(name)):
            return None
        file_id, owner, purpose, expiry = parts.groups()
        return cls(
            id=file_id,
            owner=owner,
            filename=file_id,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=time_of(file_id, FILE_PREFIX),
            expires_at=int(expiry) if expiry else None,
        )


class State(StrEnum):
    """The state of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ENDED = frozenset({State.COMPLETED, State.FAILED, State.EXPIRED, State.CANCELLED})


@dataclass(slots=True, kw_only=True)
class BatchRecord:
    """A batch. Times are Unix seconds; ``owner`` is a digest of an API key.

    ``completed`` and ``failed`` count lines; while the batch runs, those on disk lag behind.
    ``unanswered`` are those of an ended batch that failed because its time was over or it was
    cancelled.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: State = State.VALIDATING
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    unanswered: int = 0
    errors: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def has_ended(self) -> bool:
        """True if its state is final."""
        return self.status in ENDED


def entering(state: State, now: float) -> dict[str, Any]:
    """Return the fields of a batch that change as it enters a state at a time, ``now``."""
    return {"status": state, f"{state}_at": int(now)}
