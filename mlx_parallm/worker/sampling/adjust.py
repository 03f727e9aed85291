"""Masks, biases and penalties on logits, applied before a token is sampled.

Masks and biases touch few entries, so each is one gather and one scatter for all rows. Penalties
are dense over the rows that use them, because the latest token may be known to the device only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec

_Entries = list[tuple[int, Sequence[int] | np.ndarray]]


def always_adjusts(params: SamplingParams) -> bool:
    """True if ``adjust_logits`` changes a row at every step, not only for banned tokens."""
    return bool(params.logit_bias) or params.allowed_token_ids is not None or params.has_penalty


def adjust_logits(
    logits: mx.array, specs: Sequence[SampleSpec], pending: mx.array | None = None
) -> mx.array:
    """Return logits after allowed and banned tokens, biases and penalties, in vLLM's order.

    Args:
        logits: float32 ``[rows, vocab]``.
        specs: one per row.
        pending: int32 ``[rows]``, the latest output token of rows whose spec ``has_pending``.

    Returns:
        A new array, float32 ``[rows, vocab]``.
    """
    logits = _keep_allowed(logits, specs)
    logits = _add_bias(logits, specs)
    logits = _ban(logits, specs)
    return _penalise(logits, specs, pending)


def _index(entries: _Entries) -> tuple[mx.array, mx.array]:
    """Return the row and the column of each entry, int32."""
    rows = np.repeat([row for row, _ in entries], [len(columns) for _, columns in entries])
    columns = np.concatenate([np.asarray(columns, dtype=np.int32) for _, columns in entries])
    return mx.array(rows.astype(np.int32)), mx.array(columns)


def _floats(values: Iterable[float]) -> mx.array:
    return mx.array(np.fromiter(values, dtype=np.float32))


def _allowed(spec: SampleSpec) -> Sequence[int]:
    """Return the allowed tokens that are not banned; all allowed ones if none is left."""
    allowed = spec.params.allowed_token_ids or ()
    return [token for token in allowed if token not in spec.banned_ids] or allowed


def _keep_allowed(logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
    masked = [row for row, spec in enumerate(specs) if spec.params.allowed_token_ids]
    if not masked:
        return logits
    rows, columns = _index([(row, _allowed(specs[row])) for row in masked])
    kept = logits[rows, columns]
    logits[mx.array(masked)] = -mx.inf
    logits[rows, columns] = kept
    return logits


def _add_bias(logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
    biased = [(row, spec.params.logit_bias) for row, spec in enumerate(specs)]
    entries: _Entries = [(row, [token for token, _ in bias]) for row, bias in biased if bias]
    if not entries:
        return logits
    values = _floats(value for _, bias in biased for _, value in bias)
    return logits.at[_index(entries)].add(values)


def _ban(logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
    entries: _Entries = [
        (row, spec.banned_ids)
        for row, spec in enumerate(specs)
        if spec.banned_ids and not spec.params.allowed_token_ids
    ]
    if entries:
        logits[_index(entries)] = -mx.inf
    return logits


def _penalise(logits: mx.array, specs: Sequence[SampleSpec], pending: mx.array | None) -> mx.array:
    """Apply repetition penalties over prompt and output, then the other ones over the output."""
    rows = [row for row, spec in enumerate(specs) if spec.params.has_penalty]
    if not rows:
        return logits
    chosen = [specs[row] for row in rows]
    counts = _output_counts(chosen, logits.shape[1])
    if pending is not None:
        has_pending = mx.array(np.array([spec.has_pending for spec in chosen], np.float32))
        counts = counts.at[mx.arange(len(rows)), pending[mx.array(rows)]].add(has_pending)
    values = logits[mx.array(rows)]
    if any(spec.params.repetition_penalty != 1.0 for spec in chosen):
        penalty = _column(spec.params.repetition_penalty for spec in chosen)
        seen = mx.maximum(counts, _prompt_mask(chosen, logits.shape[1])) > 0
        lowered = mx.where(values > 0, values / penalty, values * penalty)
        values = mx.where(seen, lowered, values)
    values = values - _column(spec.params.frequency_penalty for spec in chosen) * counts
    values = values - _column(spec.params.presence_penalty for spec in chosen) * (counts > 0)
    logits[mx.array(rows)] = values
    return logits


def _output_counts(specs: Sequence[SampleSpec], vocab_size: int) -> mx.array:
    """Return how often each output has each token, float32 ``[rows, vocab]``."""
    counts = mx.zeros((len(specs), vocab_size))
    entries: _Entries = [(row, spec.output_ids) for row, spec in enumerate(specs)]
    return counts.at[_index(entries)].add(1.0) if any(len(ids) for _, ids in entries) else counts


def _prompt_mask(specs: Sequence[SampleSpec], vocab_size: int) -> mx.array:
    """Return 1.0 for the prompt tokens of rows with a repetition penalty, ``[rows, vocab]``."""
    mask = mx.zeros((len(specs), vocab_size))
    entries: _Entries = [
        (row, np.unique(_ids(spec.prompt_ids)))
        for row, spec in enumerate(specs)
        if spec.params.repetition_penalty != 1.0
    ]
    mask[_index(entries)] = 1.0
    return mask


def _column(values: Iterable[float]) -> mx.array:
    return _floats(values)[:, None]


def _ids(token_ids: Sequence[int]) -> np.ndarray:
    return np.asarray(token_ids, dtype=np.int32)
