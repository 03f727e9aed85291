"""The record of a batch, and the order of its states.

validating ─▶ in_progress ─▶ finalizing ─▶ completed
│              ├──────▶ finalizing ─▶ expired        (its time is over)
▼              └──────▶ cancelling ─▶ cancelled      (also from validating)
failed
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

COMPLETION_WINDOW_S = 24 * 3600


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
    """A batch as stored on disk. Times are Unix seconds; ``owner`` is a digest of an API key.

    ``completed`` and ``failed`` count lines; while the batch runs, those on disk lag behind.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: str = State.VALIDATING
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
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

    def move(self, state: State, now: float) -> None:
        """Enter a state and record the time, ``now``."""
        self.status = state
        if state is not State.VALIDATING:
            setattr(self, f"{state}_at", int(now))

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object for the disk."""
        return asdict(self)
