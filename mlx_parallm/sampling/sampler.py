"""Chooses the next token of every row at once, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.batch import SampledToken, SampleSpec, TokenLogprob
from mlx_parallm.sampling.adjust import adjust_logits
from mlx_parallm.sampling.kernel_sampling import MAX_TOP, SamplingKernels
from mlx_parallm.sampling.keys import random_keys
from mlx_parallm.sampling.logprobs import (
    NamedLogprobs,
    TargetLogprobs,
    named_logprobs,
    target_logprobs,
)
from mlx_parallm.sampling.row_settings import RowSettings
from mlx_parallm.sampling.token_masks import apply_token_mask
from mlx_parallm.sampling.truncation import truncate


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that some rows may choose.

    Attributes:
        rows: ascending; at least one.
        words: as ``apply_token_mask`` takes them, uint32 ``[len(rows), words]``.
    """

    rows: list[int]
    words: np.ndarray


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Chosen tokens, not yet evaluated.

    Attributes:
        tokens: uint32, ``[rows]``.
        logprobs: for the rows of ``logprob_counts``, in its order; None when no row asks.
        logprob_counts: ``(row, how many likeliest tokens it wants)``.
        named: for the rows that name tokens, instead of the likeliest; None when no row does.
    """

    tokens: mx.array
    logprobs: TargetLogprobs | None = None
    logprob_counts: tuple[tuple[int, int], ...] = ()
    named: NamedLogprobs | None = None

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before ``to_python``."""
        named = [self.named.values] if self.named else []
        return [self.tokens, *named, *(self.logprobs.arrays() if self.logprobs else ())]

    def to_python(self, seq_ids: Sequence[int]) -> tuple[SampledToken, ...]:
        """The tokens with their log-probabilities; ``seq_ids`` has one entry per row."""
        by_row = self._logprobs_by_row()
        tokens = np.array(self.tokens).tolist()
        return tuple(
            SampledToken(seq_id=seq_id, token_id=token, logprob=by_row.get(row))
            for row, (seq_id, token) in enumerate(zip(seq_ids, tokens, strict=True))
        )

    def _logprobs_by_row(self) -> dict[int, TokenLogprob]:
        if self.logprobs is None:
            return {}
        entries = zip(self.logprob_counts, self.logprobs.to_python(), strict=True)
        named = self.named.to_python() if self.named else {}
        return {
            row: TokenLogprob(entry.token_id, entry.logprob, named.get(row, entry.top[:count]))
            for (row, count), entry in entries
        }


class Sampler:
    """Builds lazy arrays and never evaluates them; keeps the settings of the latest rows."""

    def __init__(self, kernels: SamplingKernels | None = None) -> None:
        """``kernels`` are used for the logits that they serve, stock operations for others."""
        self._kernels = kernels
        self._rows = RowSettings(())

    def __call__(
        self,
        logits: mx.array,
        specs: Sequence[SampleSpec],
        pending: mx.array | None = None,
        masks: TokenMasks | None = None,
    ) -> SampleResult:
        """Choose one token per row.

        The order is vLLM's: masks, biases and penalties; then the likeliest token for greedy rows,
        or temperature, min-p, top-k, top-p and a draw for the others. What a row draws depends on
        its logits, its parameters and its key ``(seed, position)`` only.

        Args:
            logits: any float dtype, ``[rows, vocab]``; at least one row.
            specs: one per row.
            pending: int32 ``[rows]``, the token before the one to choose; read for rows whose spec
                ``has_pending``.
            masks: of rows whose tokens are limited, whatever their specs say.
        """
        tokens = self.choose(logits if masks is None else _masked(logits, masks), specs, pending)
        counts = self._rows.counts
        if not counts:
            return SampleResult(tokens)
        named = named_logprobs(logits, self._rows.named) if self._rows.named else None
        return SampleResult(tokens, self._logprobs(logits, tokens), counts, named)

    def choose(
        self,
        logits: mx.array,
        specs: Sequence[SampleSpec],
        pending: mx.array | None = None,
    ) -> mx.array:
        """One token per row, uint32 ``[rows]``, without log-probabilities; see ``__call__``."""
        if not self._rows.are_of(specs):
            self._rows = RowSettings(specs)
        return self._choose(self._adjust(logits, specs, pending), specs)

    def _adjust(
        self, logits: mx.array, specs: Sequence[SampleSpec], pending: mx.array | None
    ) -> mx.array:
        rows = self._rows.adjusted(specs)
        if not rows:
            return logits
        chosen = [specs[row] for row in rows]
        before = None if pending is None else _take(pending, rows)
        changed = adjust_logits(_take(logits, rows).astype(mx.float32), chosen, before)
        return _put(logits.astype(mx.float32), rows, changed)

    def _choose(self, logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
        rows = self._rows.drawn
        if not rows:
            return mx.argmax(logits, axis=-1)
        if self._kernels is not None and self._kernels.serve(logits):
            tokens, _ = self._kernels.draw(logits, self._rows.settings, self._rows.keys(specs))
            return tokens
        drawn = _draw(_take(logits, rows).astype(mx.float32), [specs[row] for row in rows])
        if len(rows) == len(specs):
            return drawn
        return _put(mx.argmax(logits, axis=-1), rows, drawn)

    def _logprobs(self, logits: mx.array, tokens: mx.array) -> TargetLogprobs:
        top = min(self._rows.top, logits.shape[-1])
        if self._kernels is not None and self._kernels.serve(logits) and top <= MAX_TOP:
            return self._kernels.logprobs(logits, tokens, self._rows.wanted, top)
        rows = [row for row, _ in self._rows.counts]
        return target_logprobs(_take(logits, rows), _take(tokens, rows), top)


def _draw(logits: mx.array, specs: Sequence[SampleSpec]) -> mx.array:
    params = [spec.params for spec in specs]
    if any(row.temperature != 1.0 for row in params):
        temperatures = np.array([row.temperature for row in params], dtype=np.float32)
        logits = logits / mx.array(temperatures)[:, None]
    return categorical(truncate(logits, params), random_keys(specs))


def categorical(logits: mx.array, keys: mx.array) -> mx.array:
    """One draw per row with the row's own key; equal to a call per row, bit for bit."""
    return mx.vmap(lambda row, key: mx.random.categorical(row, key=key))(logits, keys)


def _masked(logits: mx.array, masks: TokenMasks) -> mx.array:
    allowed = apply_token_mask(_take(logits, masks.rows), masks.words)
    return _put(logits, masks.rows, allowed)


def _take(array: mx.array, rows: list[int]) -> mx.array:
    return array if len(rows) == array.shape[0] else array[mx.array(rows)]


def _put(array: mx.array, rows: list[int], values: mx.array) -> mx.array:
    if len(rows) == array.shape[0]:
        return values
    array = array[:]
    array[mx.array(rows)] = values
    return array
