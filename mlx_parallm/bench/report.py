"""The outcome of a run as a table for people and as JSON for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mlx_parallm.bench.record import RequestRecord
from mlx_parallm.bench.statistics import Spread, Summary, chunk_gaps_s
from mlx_parallm.types.json_values import is_object

#: ``SHORT_SHARE``: outputs with a smaller share of the requested tokens are another workload.
SHORT_SHARE = 0.75
SPREADS = {
    "ttft_ms": "time to first token",
    "itl_ms": "between tokens",
    "chunk_gap_ms": "between chunks",
    "tpot_ms": "time per output token",
    "latency_ms": "whole answer",
}


def format_table(summary: Summary) -> str:
    """Return the figures of a run as lines of text."""
    lines = [
        f"requests      {summary.num_requests} ({summary.num_failed} failed)"
        f" in {summary.duration_s:.2f} s",
        f"prompt tokens {summary.prompt_tokens} ({_prompt_parts(summary)})",
        f"output tokens {summary.output_tokens}",
        f"throughput    {summary.output_tokens_per_s:.1f} output tokens/s,"
        f" {summary.requests_per_s:.2f} requests/s",
        "",
        f"{'milliseconds':<22}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99")),
    ]
    return "\n".join(
        [*lines, *(_row(label, getattr(summary, name)) for name, label in SPREADS.items())]
    )


def _prompt_parts(summary: Summary) -> str:
    cached = f"{summary.cached_tokens} cached"
    return f"{cached}, {summary.image_tokens} of images" if summary.image_tokens else cached


def _row(label: str, spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    return f"{label:<22}" + "".join(
        "         -" if math.isnan(v) else f"{v:>10.1f}" for v in values
    )


def format_errors(records: Sequence[RequestRecord]) -> str:
    """Return the distinct errors of a run with their counts; empty if there are none."""
    errors = Counter(record.error for record in records if record.error is not None)
    return "\n".join(f"{count} x {error}" for error, count in errors.most_common(10))


def format_short_outputs(records: Sequence[RequestRecord], *, ignores_eos: bool) -> str:
    """Return a note on outputs far shorter than requested; empty if there are none.

    ``ignores_eos``: True if the requests set ``ignore_eos``.
    """
    answered = [record for record in records if record.error is None]
    requested = sum(record.max_tokens for record in answered)
    got = sum(record.output_tokens for record in answered)
    if got >= SHORT_SHARE * requested:
        return ""
    num_short = sum(record.output_tokens < record.max_tokens for record in answered)
    advice = (
        "although --ignore-eos was given: this server does not know the field ignore_eos."
        if ignores_eos
        else "the model ended them. With --ignore-eos every output has the length that was asked."
    )
    return (
        f"note: outputs were far shorter than asked: {got} of {requested} tokens, "
        f"{num_short} of {len(answered)} answers ended early; {advice}"
    )


def to_json(
    settings: dict[str, Any], summary: Summary, records: Sequence[RequestRecord]
) -> dict[str, Any]:
    """Return a run as a JSON object: its settings, its figures and each of its requests."""
    begin = min((record.start_s for record in records), default=0.0)
    return {
        "settings": settings,
        "summary": finite(asdict(summary)),
        "requests": [_request_json(record, begin) for record in records],
    }


def finite(value: Any) -> Any:
    """Return ``value`` with each NaN replaced by None, because JSON has no NaN."""
    if is_object(value):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _request_json(record: RequestRecord, begin: float) -> dict[str, Any]:
    times = record.chunk_times_s
    return {
        "index": record.index,
        "start_s": record.start_s - begin,
        "end_s": record.end_s - begin,
        "ttft_ms": 1000 * (times[0] - record.start_s) if times else None,
        "chunk_gaps_ms": [round(1000 * gap, 3) for gap in chunk_gaps_s(times)],
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "image_tokens": record.image_tokens,
        "output_tokens": record.output_tokens,
        "finish_reason": record.finish_reason,
        "status": record.status,
        "error": record.error,
    }
