"""Changes to the logits that apply before a token is chosen: masks, biases and penalties.

Every change touches few entries, so each is one gather and one scatter over the entries of all
rows that use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.batch import SampleSpec

_Entries = list[tuple[int, Sequence[int] | np.ndarray]]


def needs_adjustment(spec: SampleSpec) -> bool:
    """Whether ``adjust_logits`` would change this row."""
    params = spec.params
    return (
        bool(spec.banned_ids or params.logit_bias)
        or params.allowed_token_ids is not None
        or _has_penalty(spec)
    )


def adjust_logits(logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
    """Apply allowed and banned tokens, biases, then penalties, in vLLM's order.

    Args:
        logits: float32, ``[rows, vocab]``.
        specs: one per row.

    Returns:
        A new array of the same shape.
    """
    logits = _keep_allowed(logits, specs)
    logits = _add_bias(logits, specs)
    logits = _ban(logits, specs)
    logits = _penalise_repetition(logits, specs)
    return _penalise_counts(logits, specs)


def _has_penalty(spec: SampleSpec) -> bool:
    params = spec.params
    return params.repetition_penalty != 1.0 or _has_count_penalty(spec)


def _has_count_penalty(spec: SampleSpec) -> bool:
    return spec.params.presence_penalty != 0.0 or spec.params.frequency_penalty != 0.0


def _index(entries: _Entries) -> tuple[mx.array, mx.array]:
    """Row and column of each entry, int32."""
    rows = np.repeat([row for row, _ in entries], [len(columns) for _, columns in entries])
    columns = np.concatenate([np.asarray(columns, dtype=np.int32) for _, columns in entries])
    return mx.array(rows.astype(np.int32)), mx.array(columns)


def _floats(values: Iterable[float]) -> mx.array:
    return mx.array(np.fromiter(values, dtype=np.float32))


def _allowed(spec: SampleSpec) -> Sequence[int]:
    """The allowed tokens without the banned ones, or with them where nothing else remains."""
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


def _penalise_repetition(logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
    entries: _Entries = []
    penalties: list[float] = []
    for row, spec in enumerate(specs):
        if spec.params.repetition_penalty == 1.0:
            continue
        seen = np.unique(np.concatenate([_ids(spec.prompt_ids), _ids(spec.output_ids)]))
        entries.append((row, seen))
        penalties.extend([spec.params.repetition_penalty] * len(seen))
    if not penalties:
        return logits
    where = _index(entries)
    penalty, values = _floats(penalties), logits[where]
    logits[where] = mx.where(values > 0, values / penalty, values * penalty)
    return logits


def _penalise_counts(logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
    entries: _Entries = []
    penalties: list[np.ndarray] = []
    for row, spec in enumerate(specs):
        if not _has_count_penalty(spec) or not spec.output_ids:
            continue
        seen, counts = np.unique(_ids(spec.output_ids), return_counts=True)
        entries.append((row, seen))
        params = spec.params
        penalties.append(params.frequency_penalty * counts + params.presence_penalty)
    if not entries:
        return logits
    values = mx.array(np.concatenate(penalties).astype(np.float32))
    return logits.at[_index(entries)].add(-values)


def _ids(token_ids: Sequence[int]) -> np.ndarray:
    return np.asarray(token_ids, dtype=np.int32)
