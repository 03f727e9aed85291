"""What is sent and what was seen of it: the records that travel through a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a workload.

    Attributes:
        index: its place in the workload.
        route: below the base address, such as ``/v1/completions``.
        body: the JSON body.
        max_tokens: the output tokens it asks for.
        arrival_s: when it is sent in an open loop, seconds from the start.
    """

    index: int
    route: str
    body: dict[str, Any]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What a client saw of one request; times are seconds on the client's clock.

    Attributes:
        index: the request's place in the workload.
        start_s: when it was sent.
        max_tokens: the output tokens it asked for.
        end_s: when its answer was complete, or failed.
        chunk_times_s: when each chunk with text arrived.
        chunk_tokens: output tokens known to have come with each such chunk, where the server
            reports a running count; None where it does not.
        text: the text of all choices, in order of arrival.
        finish_reason: of the last choice that finished.
        prompt_tokens: as counted in ``usage``.
        cached_tokens: of those, the ones the server took from its prefix cache.
        output_tokens: as counted in ``usage``.
        status: the HTTP status; None when there was none.
        error: why the request failed; None when it did not.
    """

    index: int
    start_s: float
    max_tokens: int = 0
    end_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int | None] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int | None = None
    error: str | None = None
