"""Log-probabilities of chosen tokens and of the likeliest ones, gathered on the device.

All are log-softmax in float32 of whatever logits they are given: the model's own, or those that a
token was drawn from, where ``-inf`` marks what could not be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import TokenLogprob

#: Stands for the logarithm of 0 of a token that was forced: JSON has no infinity.
LEAST = float(np.finfo(np.float32).min)
_Pairs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """Lazy log-probabilities of one target per row.

    Attributes:
        target_ids: integers, ``[rows]``.
        target: float32 log-probabilities of the targets, ``[rows]``.
        top_ids: the likeliest tokens, best first, ``[rows, top]``; None when none are wanted.
        top: their log-probabilities, float32, ``[rows, top]``.
        ranks: 1 plus how many tokens are likelier than the target, ``[rows]``; None when not
            wanted.
        entropies: float32, ``[rows]``; None when not wanted.
    """

    target_ids: mx.array
    target: mx.array
    top_ids: mx.array | None
    top: mx.array | None
    ranks: mx.array | None = None
    entropies: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before ``to_python``."""
        arrays = (self.target_ids, self.target, self.top_ids, self.top, self.ranks)
        return [array for array in (*arrays, self.entropies) if array is not None]

    def to_python(self, counts: Sequence[int] | None = None) -> tuple[TokenLogprob, ...]:
        """One entry per row, with at most ``counts[row]`` of the likeliest; all if not given."""
        ids: list[int] = np.array(self.target_ids).tolist()
        values: list[float] = np.maximum(np.array(self.target), LEAST).tolist()
        ranks, spread = _listed(self.ranks, len(ids)), _listed(self.entropies, len(ids))
        return tuple(map(TokenLogprob, ids, values, self._tops(counts), ranks, spread))

    def _tops(self, counts: Sequence[int] | None) -> list[_Pairs]:
        if self.top_ids is None or self.top is None:
            return [()] * self.target.shape[0]
        ids, values = np.array(self.top_ids), np.array(self.top)
        ends = (values > -np.inf).sum(axis=-1)  # best first: what is impossible comes last
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
    """Lazy log-probabilities of tokens that some rows ask for by id.

    Attributes:
        ids: of each such row, by its place among the rows.
        values: float32, ``[len(ids), the most ids of a row]``; those of shorter rows are padded.
    """

    ids: Mapping[int, tuple[int, ...]]
    values: mx.array

    def to_python(self) -> dict[int, _Pairs]:
        """Of each row, its tokens and their log-probabilities, in the order asked for."""
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
    """Log-softmax in float32 at the tokens that rows name.

    Args:
        logits: any float dtype, ``[rows, vocab]``.
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
    """Log-softmax in float32 at the targets and at the ``top`` likeliest tokens.

    Args:
        logits: any float dtype, ``[rows, vocab]``.
        target_ids: one token per row. Those that are known already, prompt tokens, are ranked; an
            array, of tokens that are still being chosen, is not.
        top: how many of the likeliest tokens to report; at most the whole vocabulary is.
        entropy: whether to report the rows' entropies.
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
    """Entropy of each row's softmax in nats, float32 ``[rows]``; what is ``-inf`` adds nothing."""
    logits = logits.astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    shares = mx.exp(logs)
    return -mx.sum(mx.where(shares > 0, shares * logs, 0.0), axis=-1)


def likeliest(logits: mx.array, count: int) -> mx.array:
    """Ids of the ``count`` largest entries, best first, equal ones by ascending id.

    Where more are equal than there is room for, any of them are kept.
    """
    split = logits.shape[-1] - count
    ids = mx.sort(mx.argpartition(logits, split, axis=-1)[:, split:], axis=-1)
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
