"""The rule of timestamps in a speech model's output."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import SampleSpec

# NONE: in place of a token that is not there.
NONE = -1


def with_timestamps(
    logits: mx.array, specs: Sequence[SampleSpec], pending: mx.array | None = None
) -> mx.array:
    """Return logits ``[rows, vocab]`` without the tokens that rules of timestamps forbid.

    Where timestamps are together likelier than the likeliest text, only they stay.

    Args:
        logits: float32, after all other rules.
        specs: one per row.
        pending: int32 ``[rows]``, the latest output token of rows whose spec ``has_pending``.
    """
    rows = [row for row, spec in enumerate(specs) if spec.params.timestamps is not None]
    if not rows:
        return logits
    places = mx.array(rows)
    ruled = _ruled(
        logits[places], [specs[row] for row in rows], None if pending is None else pending[places]
    )
    logits[places] = ruled
    return logits


def _ruled(logits: mx.array, specs: Sequence[SampleSpec], pending: mx.array | None) -> mx.array:
    begin, end, off, most = _columns([_fields(spec) for spec in specs])
    ids = mx.arange(logits.shape[1])[None]
    is_stamp, is_text = ids >= begin, ids < end
    count, before_last, last, last_stamp = _columns([_known(spec, pending) for spec in specs])
    if pending is not None:
        is_pending = mx.array([[spec.has_pending] for spec in specs])
        last = mx.where(is_pending, pending[:, None], last)
        last_stamp = mx.where(last >= begin, last, last_stamp)
    was_stamp = last >= begin
    # The first token counts as the second one of a pair.
    closes_pair = was_stamp & ((count < 2) | (before_last >= begin))
    opens_pair = was_stamp & ~closes_pair
    banned = (ids == off) | (closes_pair & is_stamp) | (opens_pair & is_text)
    least = mx.where(opens_pair, last_stamp, last_stamp + 1)
    banned |= (last_stamp >= begin) & is_stamp & (ids < least)
    banned |= (count == 0) & (~is_stamp | (ids > begin + most))
    logits = mx.where(banned, -mx.inf, logits)
    stamps = mx.logsumexp(mx.where(is_stamp, logits, -mx.inf), axis=1, keepdims=True)
    text = mx.max(mx.where(is_stamp, -mx.inf, logits), axis=1, keepdims=True)
    return mx.where((stamps > text) & ~is_stamp, -mx.inf, logits)


def _fields(spec: SampleSpec) -> tuple[int, int, int, int]:
    rule = spec.params.timestamps
    assert rule is not None, "only rows with a rule are ruled"
    return rule.begin_id, rule.end_id, rule.off_id, rule.max_initial


def _known(spec: SampleSpec, pending: mx.array | None) -> tuple[int, int, int, int]:
    """Return the number of output tokens, the two latest ones, and the latest timestamp.

    A pending token counts, but is not known.
    """
    known, begin = spec.output_ids, _fields(spec)[0]
    is_pending = spec.has_pending and pending is not None
    latest = [NONE, NONE, *known[-2:], *([NONE] if is_pending else [])]
    stamp = next((each for each in reversed(known) if each >= begin), NONE)
    return len(known) + is_pending, latest[-2], latest[-1], stamp


def _columns(rows: Sequence[tuple[int, ...]]) -> tuple[mx.array, ...]:
    """Return each field of the rows, int32 ``[rows, 1]``."""
    return tuple(mx.array(column[:, None]) for column in np.array(rows, np.int32).T)
