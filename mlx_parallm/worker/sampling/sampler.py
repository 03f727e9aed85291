"""Samples the next token of every row at once, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import (
    BEAM_MODES,
    PROCESSED_LOGPROBS,
    RAW_LOGPROBS,
    RENORMALIZED_LOGPROBS,
)
from mlx_parallm.types.step import SampledToken, SampleSpec
from mlx_parallm.worker.device.step_arrays import TokenCopy
from mlx_parallm.worker.sampling.kernel_sampling import MAX_TOP, SamplingKernels
from mlx_parallm.worker.sampling.logprobs import entropies, named_logprobs, target_logprobs
from mlx_parallm.worker.sampling.row_settings import (
    LogprobRows,
    RowLogprobs,
    RowSettings,
    random_keys,
)
from mlx_parallm.worker.sampling.truncation import Bans, adjust_logits, draw_logits


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that some rows may choose.

    Attributes:
        rows: indices of the rows, ascending; at least one.
        words: bit masks as ``apply_token_mask`` takes them, uint32 ``[len(rows), words]``.
    """

    rows: list[int]
    words: np.ndarray


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Sampled tokens, lazy.

    Attributes:
        tokens: uint32 ``[rows]``.
        logprobs: results of the rows that want log-probabilities, by group.
    """

    tokens: mx.array
    logprobs: tuple[RowLogprobs, ...] = ()

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate before ``to_python``."""
        return [self.tokens, *(array for group in self.logprobs for array in group.arrays())]

    def to_python(
        self, seq_ids: Sequence[int], token_copy: TokenCopy | None = None
    ) -> tuple[SampledToken, ...]:
        """Return the tokens with their log-probabilities; ``seq_ids`` has one id per row.

        ``token_copy`` is read in place of ``tokens``, if there is one.
        """
        by_row = {row: entry for group in self.logprobs for row, entry in group.to_python().items()}
        tokens = np.array(self.tokens).tolist() if token_copy is None else token_copy.read()
        return tuple(
            SampledToken(seq_id=seq_id, token_id=token, logprob=by_row.get(row))
            for row, (seq_id, token) in enumerate(zip(seq_ids, tokens, strict=True))
        )


@dataclass(frozen=True, slots=True)
class _Choice:
    """Tokens and what they were chosen from, lazy.

    Attributes:
        tokens: uint32 ``[rows]``.
        logits: logits after masks, biases and penalties, ``[rows, vocab]``.
        truncated: the logits that rows that are not greedy were drawn from, float32
            ``[drawn rows, vocab]``; None if kernels drew, or if all rows are greedy.
        floors: the smallest scaled logit that the kernels kept, float32 ``[rows]``; None if stock
            operations drew.
    """

    tokens: mx.array
    logits: mx.array
    truncated: mx.array | None = None
    floors: mx.array | None = None


class Sampler:
    """Samples tokens as lazy arrays. It caches the settings of the latest rows."""

    def __init__(
        self, kernels: SamplingKernels | None = None, *, logprobs_mode: str = RAW_LOGPROBS
    ) -> None:
        """Create a sampler.

        ``kernels`` are used for logits and settings that they serve, stock operations otherwise;
        ``logprobs_mode`` is for rows that name none.
        """
        self._kernels = kernels
        self._mode = logprobs_mode
        self._rows = RowSettings(())
        self._bans = Bans()

    def __call__(
        self,
        logits: mx.array,
        specs: Sequence[SampleSpec],
        pending: mx.array | None = None,
        masks: TokenMasks | None = None,
    ) -> SampleResult:
        """Return one token per row, with the log-probabilities that rows want.

        The order is vLLM's: masks, biases and penalties; then argmax for greedy rows, or
        top-n-sigma, temperature, min-p, top-k, top-p and a draw. A draw depends only on its logits,
        parameters and its key ``(seed, position)``.

        Args:
            logits: ``[rows, vocab]`` of any float dtype; at least one row.
            specs: one per row.
            pending: int32 ``[rows]``, the latest token of rows whose spec ``has_pending``.
            masks: masks for rows whose tokens are limited; they come before what specs say.
        """
        masked = logits if masks is None else _masked(logits, masks)
        choice = self._choice(masked, specs, pending)
        logprobs = [
            self._adjusted_logprobs(rows, logits, choice, specs, pending)
            if rows.mode in BEAM_MODES
            else self._logprobs(rows, logits, choice)
            for rows in self._rows.logprobs
        ]
        return SampleResult(choice.tokens, tuple(logprobs))

    def choose(
        self,
        logits: mx.array,
        specs: Sequence[SampleSpec],
        pending: mx.array | None = None,
    ) -> mx.array:
        """Return one token per row, uint32 ``[rows]``, without log-probabilities."""
        return self._choice(logits, specs, pending).tokens

    def _choice(
        self, logits: mx.array, specs: Sequence[SampleSpec], pending: mx.array | None
    ) -> _Choice:
        if not self._rows.are_of(specs):
            self._rows = RowSettings(specs, self._mode)
        return self._choose(self._adjust(logits, specs, pending), specs)

    def _adjust(
        self, logits: mx.array, specs: Sequence[SampleSpec], pending: mx.array | None
    ) -> mx.array:
        if not self._rows.always_adjusted:
            return self._bans.applied(logits, specs)
        rows = self._rows.adjusted(specs)
        chosen = [specs[row] for row in rows]
        latest = None if pending is None else _take(pending, rows)
        changed = adjust_logits(_take(logits, rows).astype(mx.float32), chosen, latest)
        return _put(logits.astype(mx.float32), rows, changed)

    def _choose(self, logits: mx.array, specs: Sequence[SampleSpec]) -> _Choice:
        rows = self._rows.drawn
        if not rows:
            return _Choice(self._greedy(logits), logits)
        if self._kernels is not None and self._kernels.serve(logits, self._rows.in_use):
            keys = self._rows.keys(specs)
            tokens, floors = self._kernels.draw(logits, self._rows.settings, keys)
            return _Choice(tokens, logits, floors=floors)
        chosen = [specs[row] for row in rows]
        drawn_logits = _take(logits, rows).astype(mx.float32)
        truncated = draw_logits(drawn_logits, [spec.params for spec in chosen])
        tokens = categorical(truncated, random_keys(chosen))
        if len(rows) < len(specs):
            tokens = _put(self._greedy(logits), rows, tokens)
        return _Choice(tokens, logits, truncated=truncated)

    def _greedy(self, logits: mx.array) -> mx.array:
        if self._kernels is not None and self._kernels.serve_greedy(logits):
            return self._kernels.greedy(logits)
        return mx.argmax(logits, axis=-1)

    def _logprobs(self, rows: LogprobRows, logits: mx.array, choice: _Choice) -> RowLogprobs:
        tokens = choice.tokens
        if rows.mode == PROCESSED_LOGPROBS:
            logits, tokens = self._processed(choice, rows.rows), _take(tokens, rows.rows)
            # A low temperature gives large logits, whose log-softmax would round differences away.
            logits = logits - mx.max(logits, axis=-1, keepdims=True)
        return self._reported(rows, logits, tokens)

    def _adjusted_logprobs(
        self,
        rows: LogprobRows,
        logits: mx.array,
        choice: _Choice,
        specs: Sequence[SampleSpec],
        pending: mx.array | None,
    ) -> RowLogprobs:
        """Return log-probabilities of the model that are adjusted as logits are, as beams need."""
        logs = _take(logits, rows.rows).astype(mx.float32)
        logs = logs - mx.logsumexp(logs, axis=-1, keepdims=True)
        adjusted = set(self._rows.adjusted(specs))
        changed = [place for place, row in enumerate(rows.rows) if row in adjusted]
        if changed:
            chosen = [rows.rows[place] for place in changed]
            latest = None if pending is None else _take(pending, chosen)
            specs_of = [specs[row] for row in chosen]
            logs = _put(logs, changed, adjust_logits(_take(logs, changed), specs_of, latest))
        reported = self._reported(rows, logs, _take(choice.tokens, rows.rows))
        if not changed or rows.mode == RENORMALIZED_LOGPROBS:
            # What is reported was normalised again.
            return reported
        return reported.shifted(mx.logsumexp(logs, axis=-1))

    def _reported(self, rows: LogprobRows, logits: mx.array, tokens: mx.array) -> RowLogprobs:
        """Return what rows report of the log-softmax of such logits, which has their places."""
        top = min(rows.top, logits.shape[-1])
        if self._kernels is not None and self._kernels.serve(logits) and top <= MAX_TOP:
            targets = self._kernels.logprobs(logits, tokens, rows.wanted, top)
        else:
            targets = target_logprobs(_take(logits, rows.places), _take(tokens, rows.places), top)
        named = named_logprobs(logits, rows.named) if rows.named else None
        spread = [rows.places[index] for index in rows.entropy]
        return RowLogprobs(
            rows, targets, named, entropies(_take(logits, spread)) if spread else None
        )

    def _processed(self, choice: _Choice, rows: list[int]) -> mx.array:
        """Return the logits that some rows' tokens were chosen from, float32 ``[n, vocab]``.

        As in vLLM, a greedy row's logits are neither scaled nor truncated.
        """
        logits = _take(choice.logits, rows).astype(mx.float32)
        if choice.floors is not None:
            settings = _take(self._rows.settings, rows)
            tokens, floors = _take(choice.tokens, rows), _take(choice.floors, rows)
            return _kept(logits, settings[:, 0], floors, tokens)
        places = {row: place for place, row in enumerate(self._rows.drawn)}
        drawn = [index for index, row in enumerate(rows) if row in places]
        if choice.truncated is None or not drawn:
            return logits
        chosen_from = _take(choice.truncated, [places[rows[index]] for index in drawn])
        return _put(logits, drawn, chosen_from)


def _kept(logits: mx.array, temperatures: mx.array, floors: mx.array, tokens: mx.array) -> mx.array:
    """Return what the kernels drew from: scaled logits, with ``-inf`` below the floor.

    The drawn token is always kept, because the division here may round differently.

    Args:
        logits: float32 ``[rows, vocab]``.
        temperatures: ``[rows]``; 0 for greedy rows, whose floors are ignored.
        floors: the smallest scaled logit kept, ``[rows]``.
        tokens: the drawn tokens, uint32 ``[rows]``.
    """
    is_greedy = temperatures == 0
    scaled = logits / mx.where(is_greedy, 1.0, temperatures)[:, None]
    kept = scaled >= mx.where(is_greedy, -mx.inf, floors)[:, None]
    is_token = mx.arange(logits.shape[-1])[None] == tokens[:, None]
    return mx.where(kept | is_token, scaled, -mx.inf)


def categorical(logits: mx.array, keys: mx.array) -> mx.array:
    """Draw a token per row with the row's key; the result equals one call per row, bit for bit."""
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


def apply_token_mask(logits: mx.array, words: np.ndarray) -> mx.array:
    """Return logits with ``-inf`` for tokens that a mask leaves out.

    Args:
        logits: ``[rows, vocab]`` of any float dtype.
        words: uint32 ``[rows, words]``: bit ``i % 32`` of word ``i // 32`` is set if token ``i`` is
            allowed; tokens beyond the last word are not.
    """
    rows, vocab = logits.shape
    num_words = -(-vocab // 32)
    words = words[:, :num_words]
    if words.shape[1] < num_words:
        words = np.pad(words, ((0, 0), (0, num_words - words.shape[1])))
    if vocab % 32:
        padded = mx.pad(logits, [(0, 0), (0, num_words * 32 - vocab)])
        masked = _mask(padded.reshape(rows, num_words, 32), mx.array(words)[:, :, None])
        return masked.reshape(rows, -1)[:, :vocab]
    return _mask(logits.reshape(rows, num_words, 32), mx.array(words)[:, :, None]).reshape(
        rows, vocab
    )


def _mask(logits: mx.array, words: mx.array) -> mx.array:
    bits = (words >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(bits.astype(mx.bool_), logits, mx.array(-mx.inf, logits.dtype))
