"""Losses of rows from the lazy results of a forward, through which a gradient goes.

``training.objectives`` computes the same from results on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.gradients import LossKind, LossSpec, LossTarget
from mlx_parallm.types.training import ChoiceInput, TrainingInput

# MAX_LOGARITHM: of ratios and divergences; float32 ends at the exponential of 88.7.
MAX_LOGARITHM = 80.0
Facts = Mapping[str, mx.array]
#: ``Losses`` are of rows, float32 ``[rows]``, with facts as in ``GradientResult``.
Losses = tuple[mx.array, Facts]


def row_losses(
    results: Sequence[mx.array],
    inputs: Sequence[TrainingInput],
    spec: LossSpec,
    targets: Sequence[LossTarget],
) -> Losses:
    """Return the loss of each row, its weight included, and facts about the rows.

    Args:
        results: the head's for each input, float32.
        inputs: those that ``check_rows`` has checked with the targets.
        spec: the loss.
        targets: of each row.
    """
    if spec.kind is LossKind.POLICY:
        losses, facts = _policy(results, inputs, spec, targets)
    else:
        table = mx.stack([result.reshape(-1) for result in results])
        losses, facts = _OF_TABLES[spec.kind](table, spec, targets)
    return losses * mx.array([target.weight for target in targets]), facts


def check_rows(
    inputs: Sequence[TrainingInput], spec: LossSpec, targets: Sequence[LossTarget]
) -> None:
    """Check that rows have what their loss is computed from.

    Raises:
        InvalidRequestError: they have not, or a number is not finite.
    """
    per_row = spec.kind.inputs_per_row
    if len(inputs) != per_row * len(targets) or not targets:
        raise _unfit(f"{len(inputs)} inputs make no {len(targets)} rows")
    for row, target in enumerate(targets):
        first = inputs[per_row * row]
        weights = _weights(first)
        numbers = (target.margin, target.advantage, target.weight)
        every = (*numbers, *target.reference, *target.logprobs, *weights)
        if not all(map(math.isfinite, every)):
            raise _unfit(f"a number of row {row} is not finite")
        if spec.kind is LossKind.DPO and not _is_preference(first, target):
            raise _unfit(f"row {row} needs two choices, and the reference of both")
        if spec.kind is LossKind.POLICY:
            _check_policy(row, first, spec, target)


def _check_policy(row: int, item: TrainingInput, spec: LossSpec, target: LossTarget) -> None:
    if not isinstance(item, ChoiceInput) or len(item.choices) != 1 or not item.by_token:
        raise _unfit(f"row {row} needs one choice, and results by token")
    (choice,) = item.choices
    if len(target.logprobs) != len(choice):
        raise _unfit(f"row {row} has {len(choice)} tokens and {len(target.logprobs)} logprobs")
    if spec.kl and len(target.reference) != len(choice):
        raise _unfit(f"row {row} has {len(choice)} tokens, and not as many of the reference")


def _is_preference(item: TrainingInput, target: LossTarget) -> bool:
    if not isinstance(item, ChoiceInput):
        return False
    return len(item.choices) == len(target.reference) == 2


def _weights(item: TrainingInput) -> list[float]:
    if not isinstance(item, ChoiceInput):
        return []
    return [weight for weights in item.weights for weight in weights]


def _unfit(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The loss cannot be computed: {why}.", param="data")


def _likelihood(table: mx.array, spec: LossSpec, targets: Sequence[LossTarget]) -> Losses:
    del spec
    return -_labelled(table, targets), {}


def _cross_entropy(table: mx.array, spec: LossSpec, targets: Sequence[LossTarget]) -> Losses:
    del spec
    return mx.logsumexp(table, axis=-1) - _labelled(table, targets), {}


def _labelled(table: mx.array, targets: Sequence[LossTarget]) -> mx.array:
    labels = mx.array([target.label for target in targets])
    return mx.take_along_axis(table, labels[:, None], axis=-1)[:, 0]


def _dpo(table: mx.array, spec: LossSpec, targets: Sequence[LossTarget]) -> Losses:
    moved = table - mx.array([target.reference for target in targets])
    margins = spec.beta * (moved[:, 0] - moved[:, 1])
    return -nn.log_sigmoid(margins), _preferences(margins)


def _pairwise(table: mx.array, spec: LossSpec, targets: Sequence[LossTarget]) -> Losses:
    if table.shape[-1] != 1:
        raise _unfit(f"the head has {table.shape[-1]} scores, and one is compared")
    scores = table.reshape(-1, 2)
    margins = scores[:, 0] - scores[:, 1]
    losses = -nn.log_sigmoid(margins - mx.array([target.margin for target in targets]))
    if spec.centring:
        losses = losses + spec.centring * mx.square(scores[:, 0] + scores[:, 1])
    return losses, _preferences(margins)


def _preferences(margins: mx.array) -> Facts:
    return {"margins": margins, "accuracies": (margins > 0).astype(mx.float32)}


_OF_TABLES: Mapping[LossKind, Callable[[mx.array, LossSpec, Sequence[LossTarget]], Losses]] = {
    LossKind.LIKELIHOOD: _likelihood,
    LossKind.CROSS_ENTROPY: _cross_entropy,
    LossKind.DPO: _dpo,
    LossKind.PAIRWISE: _pairwise,
}


def _policy(
    results: Sequence[mx.array],
    inputs: Sequence[TrainingInput],
    spec: LossSpec,
    targets: Sequence[LossTarget],
) -> Losses:
    """Return the losses of rows whose results are log-probabilities of tokens, ``[tokens]``."""
    lengths = [result.size for result in results]
    longest = max(lengths)
    table = mx.stack([mx.pad(result, (0, longest - result.size)) for result in results])
    is_token = _padded([[1.0] * length for length in lengths], longest)
    own = [_weights(item) or [1.0] * size for item, size in zip(inputs, lengths, strict=True)]
    weights = _padded(own, longest)
    moved = table - _padded([target.logprobs for target in targets], longest)
    ratios = mx.exp(_bounded(moved))
    advantages = mx.array([[target.advantage] for target in targets])
    gains = ratios * advantages
    least = gains
    if spec.is_clipped:
        clipped = mx.clip(ratios, 1 - spec.clip_low, 1 + spec.clip_high) * advantages
        least = mx.minimum(gains, clipped)
    counts = mx.sum(is_token, axis=-1)
    facts = {
        "ratios": mx.sum(ratios * is_token, axis=-1) / counts,
        "clipped": mx.sum((least < gains) * is_token, axis=-1) / counts,
    }
    losses = -least
    if all(target.reference for target in targets):
        away = _padded([target.reference for target in targets], longest) - table
        divergence = mx.exp(_bounded(away)) - away - 1
        facts["kl"] = mx.sum(divergence * is_token, axis=-1) / counts
        losses = losses + spec.kl * divergence
    return mx.sum(losses * weights, axis=-1), facts


def _bounded(logarithms: mx.array) -> mx.array:
    """Return logarithms whose exponentials are finite; those beyond have no gradient.

    The gradient of a ratio that does not count is 0 times the ratio: NaN, were that infinite.
    """
    return mx.minimum(logarithms, MAX_LOGARITHM)


def _padded(rows: Sequence[Sequence[float]], longest: int) -> mx.array:
    """Return rows with zeros behind them, float32 ``[rows, longest]``."""
    table = np.zeros((len(rows), longest), np.float32)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return mx.array(table)
