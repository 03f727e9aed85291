"""The facts about a request that its line in the log has; filled while it is answered."""

from __future__ import annotations

import contextvars
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """The facts about one HTTP request.

    Attributes:
        started_s: when it came, by ``time.monotonic``.
        model: the model or adapter that answered; None if none did.
        num_prompt_tokens: of all its prompts or texts.
        num_generated_tokens: of all samples.
        first_token_s: from its beginning to its first token; None if it has none.
        error: the code of its error, or the type where there is no code; None if it did not fail.
    """

    started_s: float = field(default_factory=time.monotonic)
    model: str | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: float | None = None
    error: str | None = None

    def note_prompt(self, model: str, num_tokens: int) -> None:
        """Count a prompt that a model reads."""
        self.model = model
        self.num_prompt_tokens += num_tokens

    def note_tokens(self, count: int) -> None:
        """Count generated tokens."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.started_s
        self.num_generated_tokens += count

    def fields(self) -> dict[str, Any]:
        """Return what is known, as fields of a line in the log."""
        is_generated = self.first_token_s is not None
        known = {
            "model": self.model,
            "prompt_tokens": self.num_prompt_tokens or None,
            "completion_tokens": self.num_generated_tokens if is_generated else None,
            "ttft_ms": None if self.first_token_s is None else round(self.first_token_s * 1000, 1),
            "error": self.error,
        }
        return {name: value for name, value in known.items() if value is not None}


def new_record() -> RequestRecord:
    """Begin the record of the request that this context answers, and return it."""
    record = RequestRecord()
    _RECORD.set(record)
    return record


def current_record() -> RequestRecord:
    """Return the record of the request that this context answers; one that is not read if none."""
    return _RECORD.get() or RequestRecord()


_RECORD: contextvars.ContextVar[RequestRecord | None] = contextvars.ContextVar(
    "record", default=None
)
