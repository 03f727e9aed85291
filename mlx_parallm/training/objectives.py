"""Objectives: the loss of each row from what the model's head returned for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class Measure(StrEnum):
    """The loss to minimise.

    cross_entropy: the negative log-probability of the right label.
    likelihood: the negative log-probability of the right choice, whatever the others have; for
        results that are log-probabilities.
    error: 1 for a wrong label and 0 for the right one; it has no gradient.
    f1: 1 less the mean F1 of the labels over all rows together; it has no gradient.
    reward: the reward of what the model generates, negated; measured by the judge of samples.
    """

    CROSS_ENTROPY = "cross_entropy"
    LIKELIHOOD = "likelihood"
    ERROR = "error"
    F1 = "f1"
    REWARD = "reward"

    @property
    def is_forward(self) -> bool:
        """True if it is measured from a forward's results, not from what is generated."""
        return self is not Measure.REWARD


@dataclass(frozen=True, slots=True)
class Scores:
    """Quality of predicted labels.

    Attributes:
        loss: mean cross entropy; of a single choice, the mean of its negative log-probability.
        accuracy: share of right labels; None if there was a single choice.
        f1: mean over the labels of the harmonic mean of precision and recall; labels that occur
            neither as right nor as predicted ones are left out; None as above.
    """

    loss: float
    accuracy: float | None
    f1: float | None


def losses(results: Sequence[np.ndarray], labels: Sequence[int], measure: Measure) -> np.ndarray:
    """Return the loss of each row, float64 ``[rows]``; for ``Measure.F1`` that of ``ERROR``.

    Args:
        results: logits of the labels for each row, float32 ``[labels]`` or ``[1, labels]``.
        labels: the right ones.
        measure: what is measured.
    """
    logits = _logits(results)
    right = np.asarray(labels)
    if measure in (Measure.ERROR, Measure.F1):
        return (logits.argmax(axis=1) != right).astype(np.float64)
    if measure is Measure.LIKELIHOOD:
        return -logits[np.arange(len(right)), right]
    return _cross_entropy(logits, right)


def scores(results: Sequence[np.ndarray], labels: Sequence[int]) -> Scores:
    """Return how well labels were predicted; see ``losses`` for the arguments."""
    logits, right = _logits(results), np.asarray(labels)
    if logits.shape[1] == 1:
        return Scores(loss=float(-logits.mean()), accuracy=None, f1=None)
    chosen = logits.argmax(axis=1)
    return Scores(
        loss=float(_cross_entropy(logits, right).mean()),
        accuracy=float((chosen == right).mean()),
        f1=_macro_f1(chosen, right),
    )


def f1_loss(results: Sequence[np.ndarray], labels: Sequence[int]) -> float:
    """Return 1 less the mean F1 over rows; NaN if a logit is not finite."""
    logits = _logits(results)
    if not np.isfinite(logits).all():
        return float("nan")
    return 1.0 - _macro_f1(logits.argmax(axis=1), np.asarray(labels))


def _logits(results: Sequence[np.ndarray]) -> np.ndarray:
    """Return logits, float64 ``[rows, labels]``."""
    return np.stack([result.reshape(-1) for result in results]).astype(np.float64)


def _cross_entropy(logits: np.ndarray, right: np.ndarray) -> np.ndarray:
    most = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - most).sum(axis=1)) + most[:, 0]
    return total - logits[np.arange(len(right)), right]


def _macro_f1(chosen: np.ndarray, right: np.ndarray) -> float:
    values: list[float] = []
    for label in np.union1d(chosen, right):
        both = np.sum((chosen == label) & (right == label))
        values.append(2 * both / (np.sum(chosen == label) + np.sum(right == label)))
    return float(np.mean(values))
