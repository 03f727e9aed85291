"""Log-probabilities of chosen, likeliest and named tokens, gathered on the device.

All are a log-softmax in float32 of the logits passed in: the model's own, or those that a token was
drawn from, where ``-inf`` marks what could not be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import TokenLogprob

#: ``LEAST`` stands for log(0), of a forced token: JSON has no infinity.
LEAST = float(np.finfo(np.float32).min)
_Pairs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """Lazy log-probabilities of one target per row.

    Attributes:
        target_ids: integers ``[rows]``.
        target: log-probabilities of the targets, float32 ``[rows]``.
        top_ids: the likeliest tokens, best first, ``[rows, top]``; None if none are wanted.
        top: their log-probabilities, float32 ``[rows, top]``.
        ranks: 1 plus the number of tokens likelier than the target, ``[rows]``; None if unknown.
        entropies: float32 ``[rows]``; None if not wanted.
    """

    target_ids: mx.array
    target: mx.array
    top_ids: mx.array | None
    top: mx.array | None
    ranks: mx.array | None = None
    entropies: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate before ``to_python``."""
        arrays = (self.target_ids, self.target, self.top_ids, self.top, self.ranks)
        return [array for array in (*arrays, self.entropies) if array is not None]

    def shifted(self, shifts: mx.array) -> TargetLogprobs:
        """Return log-probabilities that are larger by ``shifts``, float32 ``[rows]``."""
        top = None if self.top is None else self.top + shifts[:, None]
        return replace(self, target=self.target + shifts, top=top)

    def to_python(self, counts: Sequence[int] | None = None) -> tuple[TokenLogprob, ...]:
        """Return one entry per row, with up to ``counts[row]`` likeliest tokens; None: all."""
        ids: list[int] = np.array(self.target_ids).tolist()
        values: list[float] = np.maximum(np.array(self.target), LEAST).tolist()
        ranks, spread = _listed(self.ranks, len(ids)), _listed(self.entropies, len(ids))
        return tuple(map(TokenLogprob, ids, values, self._tops(counts), ranks, spread))

    def _tops(self, counts: Sequence[int] | None) -> list[_Pairs]:
        if self.top_ids is None or self.top is None:
            return [()] * self.target.shape[0]
        ids, values = np.array(self.top_ids), np.array(self.top)
        # Tokens are sorted best first, so impossible ones come last.
        ends = (values > -np.inf).sum(axis=-1)
        if counts is not None:
            ends = np.minimum(ends, counts)
        return [
            tuple(zip(row_ids[:end].tolist(), row[:end].tolist(), strict=True))
            for row_ids, row, end in zip(ids, values, ends, strict=True)
        ]


def _listed(values: mx.array | None, count: int) -> list[Any]:
    return [None] * count if values is None else np.array(values).tolist()


@dataclass(frozen=True, slots=True)
class NamedLogprobs:
    """Lazy log-probabilities of tokens that rows want by id.

    Attributes:
        ids: the token ids of each such row, by its index in the logits.
        values: float32 ``[len(ids), longest]``, where shorter rows are padded.
    """

    ids: Mapping[int, tuple[int, ...]]
    values: mx.array

    def to_python(self) -> dict[int, _Pairs]:
        """Return the tokens of each row with their log-probabilities, in the order of ``ids``."""
        rows = zip(self.ids.items(), np.array(self.values).tolist(), strict=True)
        return {
            row: tuple(
                (token, value)
                for token, value in zip(ids, values, strict=False)
                if value > -float("inf")
            )
            for (row, ids), values in rows
        }


def named_logprobs(logits: mx.array, ids: Mapping[int, tuple[int, ...]]) -> NamedLogprobs:
    """Return the log-softmax, in float32, at the tokens that rows name.

    Args:
        logits: ``[rows, vocab]`` of any float dtype.
        ids: token ids by row; not empty.
    """
    width = max(map(len, ids.values()))
    padded = [[*row, *[0] * (width - len(row))] for row in ids.values()]
    logits = logits[mx.array(list(ids))].astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    return NamedLogprobs(ids, mx.take_along_axis(logits, mx.array(padded), axis=-1) - norm)


def target_logprobs(
    logits: mx.array, target_ids: mx.array | Sequence[int], top: int, *, entropy: bool = False
) -> TargetLogprobs:
    """Return the log-softmax, in float32, at the targets and at the ``top`` likeliest tokens.

    Args:
        logits: ``[rows, vocab]`` of any float dtype.
        target_ids: one token per row. Python integers are known tokens, such as a prompt's, and get
            ranks; an array of tokens that are still being chosen does not.
        top: how many of the likeliest tokens to return, up to the whole vocabulary.
        entropy: True to return the rows' entropies.
    """
    is_known = not isinstance(target_ids, mx.array)
    targets = mx.array(list(target_ids)) if is_known else target_ids
    logits = logits.astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)
    target = (chosen - norm)[:, 0]
    ranks = mx.sum(logits > chosen, axis=-1) + 1 if is_known else None
    spread = entropies(logits) if entropy else None
    if top <= 0:
        return TargetLogprobs(targets, target, None, None, ranks, spread)
    top_ids = likeliest(logits, min(top, logits.shape[-1]))
    values = mx.take_along_axis(logits, top_ids, axis=-1) - norm
    return TargetLogprobs(targets, target, top_ids, values, ranks, spread)


def entropies(logits: mx.array) -> mx.array:
    """Return the entropy of each row's softmax in nats, float32 ``[rows]``; 0 log 0 is 0."""
    logits = logits.astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    shares = mx.exp(logs)
    return -mx.sum(mx.where(shares > 0, shares * logs, 0.0), axis=-1)


def likeliest(logits: mx.array, count: int) -> mx.array:
    """Return the ids of the ``count`` largest entries, best first, equal ones by ascending id.

    If more entries are equal than there is room for, any of them may be returned.
    """
    split = logits.shape[-1] - count
    ids = mx.sort(mx.argpartition(logits, split, axis=-1)[:, split:], axis=-1)
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
