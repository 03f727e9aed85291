"""The records of a benchmark: planned requests, and what the client measured of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a workload.

    Attributes:
        index: its index in the workload.
        route: its path below the base address, such as ``/v1/completions``.
        body: the JSON body.
        max_tokens: the number of output tokens that it requests.
        arrival_s: when it is sent in an open loop, in seconds from the start.
    """

    index: int
    route: str
    body: dict[str, Any]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The client's measurements of one request; times are seconds on the client's clock.

    Attributes:
        index: the request's index in the workload.
        start_s: when it was sent.
        max_tokens: the number of output tokens that it requested.
        end_s: when its answer was complete, or failed.
        chunk_times_s: when each chunk with text arrived.
        chunk_tokens: number of output tokens of each such chunk; None if the server reports no
            running count.
        text: the text of all choices, in order of arrival.
        finish_reason: the reason of the last choice that finished.
        prompt_tokens: the prompt's tokens, from ``usage``.
        cached_tokens: how many of these came from the server's prefix cache.
        image_tokens: how many of the prompt's tokens are of images, if the server reports it.
        output_tokens: the output's tokens, from ``usage``.
        status: the HTTP status; None if there was no response.
        error: why the request failed; None if it did not.
    """

    index: int
    start_s: float
    max_tokens: int = 0
    end_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list[float])
    chunk_tokens: list[int | None] = field(default_factory=list[int | None])
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0
    output_tokens: int = 0
    status: int | None = None
    error: str | None = None
