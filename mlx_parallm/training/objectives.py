"""Objectives: the loss of each row from what the model's head returned for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from mlx_parallm.types.gradients import LossKind, LossSpec, LossTarget
from mlx_parallm.types.training import ChoiceInput, TrainingInput


class Measure(StrEnum):
    """The loss to minimise.

    cross_entropy: the negative log-probability of the right label.
    likelihood: the negative log-probability of the right choice, whatever the others have; for
        results that are log-probabilities.
    error: 1 for a wrong label and 0 for the right one; it has no gradient.
    f1: 1 less the mean F1 of the labels over all rows together; it has no gradient.
    reward: the reward of what the model generates, negated; measured by the judge of samples.
    preference: the negative log-probability that the chosen of two is preferred; by gradients only.
    policy: the negative advantage times the ratio of probabilities; by gradients only.
    """

    CROSS_ENTROPY = "cross_entropy"
    LIKELIHOOD = "likelihood"
    ERROR = "error"
    F1 = "f1"
    REWARD = "reward"
    PREFERENCE = "preference"
    POLICY = "policy"

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


def row_losses(
    results: Sequence[np.ndarray],
    inputs: Sequence[TrainingInput],
    spec: LossSpec,
    targets: Sequence[LossTarget],
) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
    """Return losses and facts of rows as ``GradientForward`` does, from results that are known.

    Args:
        results: the head's for each input.
        inputs: those of all rows.
        spec: the loss.
        targets: of each row.
    """
    per_row = spec.kind.inputs_per_row
    losses: list[float] = []
    facts: list[Mapping[str, float]] = []
    for row, target in enumerate(targets):
        own = slice(row * per_row, (row + 1) * per_row)
        values = np.concatenate([each.reshape(-1) for each in results[own]]).astype(np.float64)
        loss, fact = _row_loss(values, inputs[own][0], spec, target)
        losses.append(target.weight * loss)
        facts.append(fact)
    return np.array(losses), {name: np.array([each[name] for each in facts]) for name in facts[0]}


def _row_loss(
    values: np.ndarray, item: TrainingInput, spec: LossSpec, target: LossTarget
) -> tuple[float, Mapping[str, float]]:
    """Return a row's loss without its weight, and facts; ``values`` are all results of the row."""
    match spec.kind:
        case LossKind.LIKELIHOOD:
            return -float(values[target.label]), {}
        case LossKind.CROSS_ENTROPY:
            return float(np.logaddexp.reduce(values) - values[target.label]), {}
        case LossKind.DPO:
            moved = values - np.array(target.reference)
            margin = spec.beta * float(moved[0] - moved[1])
            return float(np.logaddexp(0, -margin)), _preference(margin)
        case LossKind.PAIRWISE:
            margin = float(values[0] - values[1])
            loss = float(np.logaddexp(0, target.margin - margin))
            return loss + spec.centring * float(values.sum()) ** 2, _preference(margin)
        case LossKind.POLICY:
            return _policy_loss(values, item, spec, target)


def _preference(margin: float) -> Mapping[str, float]:
    return {"margins": margin, "accuracies": float(margin > 0)}


def _policy_loss(
    logprobs: np.ndarray, item: TrainingInput, spec: LossSpec, target: LossTarget
) -> tuple[float, Mapping[str, float]]:
    weights = np.ones(len(logprobs))
    if isinstance(item, ChoiceInput) and item.weights:
        weights = np.array(item.weights[0])
    ratios = np.exp(logprobs - np.array(target.logprobs))
    gains = ratios * target.advantage
    least = gains
    if spec.is_clipped:
        clipped = np.clip(ratios, 1 - spec.clip_low, 1 + spec.clip_high)
        least = np.minimum(gains, clipped * target.advantage)
    losses, facts = -least, {"ratios": ratios.mean(), "clipped": (least < gains).mean()}
    if target.reference:
        away = np.array(target.reference) - logprobs
        divergence = np.exp(away) - away - 1
        losses, facts["kl"] = losses + spec.kl * divergence, divergence.mean()
    return float((weights * losses).sum()), facts
