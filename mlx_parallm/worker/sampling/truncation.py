"""The stages from logits to those that tokens are drawn from: adjusting, then truncation.

min-p, top-k and top-p are one threshold per row: each keeps the likeliest tokens, so together they
amount to the smallest logit kept. Tokens that tie with it are kept too: the result must not depend
on how equal logits happen to be sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling.timestamps import with_timestamps

_Entries = list[tuple[int, Sequence[int] | np.ndarray]]


def always_adjusts(params: SamplingParams) -> bool:
    """True if ``adjust_logits`` changes a row at every step, not only for banned tokens."""
    has_list = bool(params.logit_bias) or params.allowed_token_ids is not None
    return has_list or params.has_penalty or params.timestamps is not None


class Bans:
    """The banned tokens of a batch's rows; they seldom change from step to step."""

    def __init__(self) -> None:
        self._banned: list[tuple[int, ...]] = []
        self._index: tuple[mx.array, mx.array] | None = None

    def applied(self, logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
        """Return logits of any float dtype, ``[rows, vocab]``, with ``-inf`` for banned tokens."""
        banned = [spec.banned_ids for spec in specs]
        # Lists compare identity first, and what is banned usually is the same object.
        if banned != self._banned:
            entries: _Entries = [(row, ids) for row, ids in enumerate(banned) if ids]
            self._banned, self._index = banned, _index(entries) if entries else None
        if self._index is None:
            return logits
        logits = logits[:]
        logits[self._index] = -mx.inf
        return logits


def adjust_logits(
    logits: mx.array, specs: Sequence[SampleSpec], pending: mx.array | None = None
) -> mx.array:
    """Return logits after allowed and banned tokens, biases and penalties, in vLLM's order.

    The rule of timestamps is last: it counts what the others have left.

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
    return with_timestamps(_penalise(logits, specs, pending), specs, pending)


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


# _MAX_CANDIDATES: rows with a top-k up to this are truncated from their largest logits alone. The
# limit depends on the row only, because its samples must not depend on the other rows.
_MAX_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Stage:
    """A change of logits before a draw.

    Attributes:
        settings: the fields of ``SamplingParams`` that it reads.
        is_on: returns whether it changes the logits of a row with such parameters.
        apply: returns float32 logits ``[rows, vocab]`` for such logits and parameters per row,
            if it is on for any of the rows.
    """

    settings: tuple[str, ...]
    is_on: Callable[[SamplingParams], bool]
    apply: Callable[[mx.array, Sequence[SamplingParams]], mx.array]


def settings_in_use(params: Iterable[SamplingParams]) -> frozenset[str]:
    """Return the settings of the stages that change the logits of some row."""
    rows = list(params)
    stages = (stage for stage in STAGES if any(map(stage.is_on, rows)))
    return frozenset(name for stage in stages for name in stage.settings)


def draw_logits(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Return logits after all stages, with ``-inf`` where nothing may be drawn.

    Args:
        logits: float32 ``[rows, vocab]``, after masks, biases and penalties.
        params: one per row, none greedy.
    """
    for stage in STAGES:
        if any(map(stage.is_on, params)):
            logits = stage.apply(logits, params)
    return logits


def truncate(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Return logits with ``-inf`` where min-p, then top-k, then top-p leave a token out.

    min-p is arXiv:2407.01082, top-p arXiv:1904.09751. The order, and the renormalisation between
    the steps, are vLLM's.

    Args:
        logits: float32 ``[rows, vocab]``, already divided by the temperature.
        params: one per row.

    Returns:
        A new array, or ``logits`` itself if no row is truncated.
    """
    vocab = logits.shape[-1]
    if any(row.min_p > 0 for row in params):
        logits = _min_p(logits, params)
    few = [i for i, row in enumerate(params) if 0 < row.top_k <= min(_MAX_CANDIDATES, vocab - 1)]
    chosen = set(few)
    many = [
        i
        for i, row in enumerate(params)
        if i not in chosen and (row.top_p < 1 or 0 < row.top_k < vocab)
    ]
    if few:
        logits = _apply(logits, few, params, _largest(max(params[i].top_k for i in few)))
    if many:
        logits = _apply(logits, many, params, _all_sorted)
    return logits


def _top_n_sigma(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Keep logits from ``max - n * std`` on; masked tokens do not count for the deviation.

    This is arXiv:2411.07641, with the population's deviation as in llama.cpp.
    """
    is_on = mx.array([row.top_n_sigma > 0 for row in params])[:, None]
    with np.errstate(over="ignore"):
        n = mx.array(np.array([row.top_n_sigma for row in params]).astype(np.float32))[:, None]
    is_possible = logits > -mx.inf
    count = mx.sum(is_possible, axis=-1, keepdims=True)
    largest = mx.max(logits, axis=-1, keepdims=True)
    # Logits minus the largest have the same deviation, and a small mean even if they are large.
    below = mx.where(is_possible, logits - largest, 0.0)
    mean = mx.sum(below, axis=-1, keepdims=True) / count
    squares = mx.where(is_possible, mx.square(below - mean), 0.0)
    deviation = mx.sqrt(mx.sum(squares, axis=-1, keepdims=True) / count)
    # Where the product is no number, for an infinite n or deviation, nothing is dropped.
    is_dropped = is_on & (below < -n * deviation)
    return mx.where(is_dropped, -mx.inf, logits)


def _scale(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    return logits / mx.array(np.array([row.temperature for row in params], np.float32))[:, None]


def _min_p(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    with np.errstate(divide="ignore"):
        logs = np.log(np.array([row.min_p for row in params], dtype=np.float32))
    floor = mx.max(logits, axis=-1, keepdims=True) + mx.array(logs)[:, None]
    return mx.where(logits >= floor, logits, -mx.inf)


def _largest(count: int) -> Callable[[mx.array], mx.array]:
    """Return a function that selects the ``count`` largest of each row, sorted descending."""

    def select(logits: mx.array) -> mx.array:
        split = logits.shape[-1] - count
        return mx.sort(mx.partition(logits, split, axis=-1)[:, split:], axis=-1)[:, ::-1]

    return select


def _all_sorted(logits: mx.array) -> mx.array:
    # Sorting order-preserving integers is a third faster on the CPU than sorting floats.
    return _swap_order(mx.sort(_swap_order(logits.view(mx.int32)), axis=-1)).view(mx.float32)[
        :, ::-1
    ]


def _swap_order(bits: mx.array) -> mx.array:
    """Map float bits to integers of the same order, or back."""
    return mx.bitwise_xor(bits, mx.bitwise_and(mx.right_shift(bits, 31), 0x7FFFFFFF))


def _apply(
    logits: mx.array,
    rows: list[int],
    params: Sequence[SamplingParams],
    select: Callable[[mx.array], mx.array],
) -> mx.array:
    """Truncate ``rows``; ``select`` returns their candidates, sorted descending."""
    everything = len(rows) == logits.shape[0]
    subset = logits if everything else logits[mx.array(rows)]
    floor = _threshold(select(subset), [params[i] for i in rows])
    subset = mx.where(subset >= floor, subset, -mx.inf)
    if everything:
        return subset
    logits = logits[:]
    logits[mx.array(rows)] = subset
    return logits


def _threshold(ordered: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Return the smallest logit kept, ``[rows, 1]``.

    Args:
        ordered: candidates ``[rows, candidates]``, sorted descending.
        params: one per row.
    """
    width = ordered.shape[-1]
    ks = [min(row.top_k, width) if row.top_k > 0 else width for row in params]
    last = mx.array(np.array(ks, dtype=np.int32) - 1)[:, None]
    if all(row.top_p >= 1 for row in params):
        return mx.take_along_axis(ordered, last, axis=-1)
    # top-k keeps all tokens that tie with the k-th, but top-p counts only k of them, because the
    # candidates may not include the others.
    inside = mx.arange(width)[None] <= last
    weights = mx.where(inside, mx.exp(ordered - ordered[:, :1]), 0.0)
    # The total is read from the cumulative sum, so that it does not depend on trailing zeros.
    mass = mx.cumsum(weights, axis=-1)
    top_p = mx.array(np.array([row.top_p for row in params], dtype=np.float32))[:, None]
    kept = mx.sum((mass - weights < top_p * mass[:, -1:]) & inside, axis=-1, keepdims=True)
    unlimited = mx.array(np.array([row.top_p >= 1 for row in params]))[:, None]
    return mx.take_along_axis(ordered, mx.where(unlimited, last, mx.maximum(kept, 1) - 1), axis=-1)


# STAGES: in the order in which they apply. A device's kernels draw only for the settings that they
# know, so a stage that is added here is honoured on every device.
STAGES: tuple[Stage, ...] = (
    Stage(("top_n_sigma",), lambda row: row.top_n_sigma > 0, _top_n_sigma),
    Stage(("temperature",), lambda row: row.temperature != 1.0, _scale),
    Stage(
        ("min_p", "top_k", "top_p"),
        lambda row: row.min_p > 0 or row.top_k > 0 or row.top_p < 1,
        truncate,
    ),
)
