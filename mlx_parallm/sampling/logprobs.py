"""Log-probabilities of chosen tokens and of the likeliest ones, gathered on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.batch import TokenLogprob


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
    """

    target_ids: mx.array
    target: mx.array
    top_ids: mx.array | None
    top: mx.array | None
    ranks: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before ``to_python``."""
        arrays = (self.target_ids, self.target, self.top_ids, self.top, self.ranks)
        return [array for array in arrays if array is not None]

    def to_python(self) -> tuple[TokenLogprob, ...]:
        """One entry per row."""
        ids: list[int] = np.array(self.target_ids).tolist()
        values: list[float] = np.array(self.target).tolist()
        ranks = [None] * len(ids) if self.ranks is None else np.array(self.ranks).tolist()
        return tuple(map(TokenLogprob, ids, values, self._tops(), ranks))

    def _tops(self) -> list[tuple[tuple[int, float], ...]]:
        if self.top_ids is None or self.top is None:
            return [()] * self.target.shape[0]
        pairs = zip(np.array(self.top_ids).tolist(), np.array(self.top).tolist(), strict=True)
        return [tuple(zip(row_ids, row, strict=True)) for row_ids, row in pairs]


@dataclass(frozen=True, slots=True)
class NamedLogprobs:
    """Lazy log-probabilities of tokens that some rows ask for by id.

    Attributes:
        ids: of each such row, by its place in the batch.
        values: float32, ``[len(ids), the most ids of a row]``; those of shorter rows are padded.
    """

    ids: Mapping[int, tuple[int, ...]]
    values: mx.array

    def to_python(self) -> dict[int, tuple[tuple[int, float], ...]]:
        """Of each row, its tokens and their log-probabilities, in the order asked for."""
        rows = zip(self.ids.items(), np.array(self.values).tolist(), strict=True)
        return {row: tuple(zip(ids, values, strict=False)) for (row, ids), values in rows}


def named_logprobs(logits: mx.array, ids: Mapping[int, tuple[int, ...]]) -> NamedLogprobs:
    """Log-softmax in float32 at the tokens that rows name.

    Args:
        logits: any float dtype, ``[rows, vocab]``; the model's own, unmodified.
        ids: token ids by row; not empty.
    """
    width = max(map(len, ids.values()))
    padded = [[*row, *[0] * (width - len(row))] for row in ids.values()]
    logits = logits[mx.array(list(ids))].astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    return NamedLogprobs(ids, mx.take_along_axis(logits, mx.array(padded), axis=-1) - norm)


def target_logprobs(
    logits: mx.array, target_ids: mx.array | Sequence[int], top: int
) -> TargetLogprobs:
    """Log-softmax in float32 at the targets and at the ``top`` likeliest tokens.

    Args:
        logits: any float dtype, ``[rows, vocab]``; the model's own, unmodified.
        target_ids: one token per row. Those that are known already, prompt tokens, are ranked; an
            array, of tokens that are still being chosen, is not.
        top: how many of the likeliest tokens to report; at most the whole vocabulary is.
    """
    is_known = not isinstance(target_ids, mx.array)
    targets = mx.array(list(target_ids)) if is_known else target_ids
    logits = logits.astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)
    target = (chosen - norm)[:, 0]
    ranks = mx.sum(logits > chosen, axis=-1) + 1 if is_known else None
    if top <= 0:
        return TargetLogprobs(targets, target, None, None, ranks)
    top_ids = _likeliest(logits, min(top, logits.shape[-1]))
    values = mx.take_along_axis(logits, top_ids, axis=-1) - norm
    return TargetLogprobs(targets, target, top_ids, values, ranks)


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """Ids of the ``count`` largest entries, best first, equal ones by ascending id."""
    split = logits.shape[-1] - count
    ids = mx.sort(mx.argpartition(logits, split, axis=-1)[:, split:], axis=-1)
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
