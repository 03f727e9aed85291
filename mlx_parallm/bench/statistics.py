"""Figures of a run: percentiles of the times a client sees, and throughput."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.bench.record import RequestRecord


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile, linear between neighbours; NaN of no values.

    Raises:
        ValueError: ``percent`` is outside 0 … 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"no percentile: {percent}")
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some times; NaN if there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise ``values``."""
        mean = sum(values) / len(values) if values else math.nan
        p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
        return cls(len(values), mean, p50, p90, p99, max(values, default=math.nan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run; times are milliseconds.

    Attributes:
        duration_s: from the first request sent to the last answer complete.
        num_failed: requests without a complete answer; they count in no other figure.
        output_tokens_per_s: all output tokens over the duration.
        ttft_ms: from sending a request to its first non-empty text.
        itl_ms: between tokens; the tokens of one chunk share the gap before it equally.
        chunk_gap_ms: between chunks with text, whatever the tokens in them.
        tpot_ms: per request, the time from its first text to its last over the tokens between.
        latency_ms: from sending a request to the end of its answer.
    """

    duration_s: float
    num_requests: int
    num_failed: int
    prompt_tokens: int
    cached_tokens: int
    image_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    chunk_gap_ms: Spread
    tpot_ms: Spread
    latency_ms: Spread


def tokens_per_chunk(record: RequestRecord) -> list[int]:
    """Return how many tokens came with each chunk with text.

    If the server reports a running count, the numbers are exact. Otherwise the request's output
    tokens are spread over its chunks as evenly as whole numbers allow.
    """
    reported = [tokens for tokens in record.chunk_tokens if tokens is not None]
    if len(reported) == len(record.chunk_times_s):
        return reported
    count = len(record.chunk_times_s)
    shares = [record.output_tokens * place // count for place in range(count + 1)]
    return [after - before for before, after in itertools.pairwise(shares)]


def token_gaps_s(times_s: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return the time between tokens: a chunk of k tokens gives k equal shares of its gap.

    The tokens of the first chunk have no gap (their wait is the time to first token). The gap
    of a chunk without a token is added to the next one's.
    """
    gaps: list[float] = []
    previous = times_s[0] if times_s else 0.0
    for now, count in zip(times_s[1:], tokens[1:], strict=True):
        if count > 0:
            gaps += [(now - previous) / count] * count
            previous = now
    return gaps


def chunk_gaps_s(times_s: Sequence[float]) -> list[float]:
    """Return the time between chunks."""
    return [after - before for before, after in itertools.pairwise(times_s)]


def summarise(records: Sequence[RequestRecord]) -> Summary:
    """Return the figures of a run."""
    answered = [record for record in records if record.error is None]
    timed = [record for record in answered if record.chunk_times_s]
    begin = min((record.start_s for record in records), default=0.0)
    duration_s = max((record.end_s for record in records), default=0.0) - begin
    output_tokens = sum(record.output_tokens for record in answered)
    return Summary(
        duration_s=duration_s,
        num_requests=len(records),
        num_failed=len(records) - len(answered),
        prompt_tokens=sum(record.prompt_tokens for record in answered),
        cached_tokens=sum(record.cached_tokens for record in answered),
        image_tokens=sum(record.image_tokens for record in answered),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s if duration_s else 0.0,
        requests_per_s=len(answered) / duration_s if duration_s else 0.0,
        ttft_ms=_spread_ms([record.chunk_times_s[0] - record.start_s for record in timed]),
        itl_ms=_spread_ms([gap for record in timed for gap in _token_gaps(record)]),
        chunk_gap_ms=_spread_ms(
            [gap for record in timed for gap in chunk_gaps_s(record.chunk_times_s)]
        ),
        tpot_ms=_spread_ms([_time_per_token(r) for r in timed if r.output_tokens > 1]),
        latency_ms=_spread_ms([record.end_s - record.start_s for record in answered]),
    )


def _spread_ms(values_s: list[float]) -> Spread:
    return Spread.of([1000 * value for value in values_s])


def _token_gaps(record: RequestRecord) -> list[float]:
    return token_gaps_s(record.chunk_times_s, tokens_per_chunk(record))


def _time_per_token(record: RequestRecord) -> float:
    span_s = record.chunk_times_s[-1] - record.chunk_times_s[0]
    return span_s / (record.output_tokens - 1)
