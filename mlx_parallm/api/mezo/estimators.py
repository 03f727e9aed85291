"""From the estimator of a body to its settings, and to the loss that gradients are taken of."""

from __future__ import annotations

from mlx_parallm.api.mezo.schema import CreateSession, EstimatorBody, GradientBody, Pairs, Policy
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.settings import PAPER, EstimatorSettings, GradientSettings, MezoSettings
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.gradients import LossKind, LossSpec

# ESTIMATOR_FIELDS: fields of the body by those of the settings.
ESTIMATOR_FIELDS = {
    "sides": "kind",
    "num_directions": "directions",
    "splits_batch": "groups",
    "distribution": "distribution",
    "epsilon": "epsilon",
    "learning_rate": "learning_rate",
    "normalises": "normalise",
    "decay_steps": "decay_steps",
    "weight_decay": "weight_decay",
}
# LOSSES: the losses of measures that have a gradient.
LOSSES = {
    Measure.CROSS_ENTROPY: LossSpec(kind=LossKind.CROSS_ENTROPY),
    Measure.LIKELIHOOD: LossSpec(kind=LossKind.LIKELIHOOD),
}


def estimator_of(body: EstimatorBody | GradientBody) -> EstimatorSettings:
    """Return the settings; raise InvalidRequestError if weight decay would take more than all."""
    if isinstance(body, GradientBody):
        settings: EstimatorSettings = GradientSettings(**body.model_dump(exclude={"kind"}))
    else:
        settings = _perturbations(body)
    if settings.learning_rate * settings.weight_decay > 1:
        raise InvalidRequestError(
            "estimator.weight_decay: times learning_rate it can be at most 1, where a step takes "
            "all of the parameters away.",
            param="estimator.weight_decay",
        )
    return settings


def _perturbations(body: EstimatorBody) -> MezoSettings:
    settings = {name: getattr(body, field) for name, field in ESTIMATOR_FIELDS.items()}
    if body.preset is None:
        return MezoSettings(**settings)
    was_set = body.model_fields_set
    chosen = {name: settings[name] for name, field in ESTIMATOR_FIELDS.items() if field in was_set}
    paper = {name: getattr(PAPER, name) for name in ESTIMATOR_FIELDS}
    return MezoSettings(**(paper | chosen))


def loss_of(body: CreateSession, *, has_score: bool) -> LossSpec | None:
    """Return the loss that gradients are taken of; None if none are.

    Args:
        body: the request.
        has_score: True if its model has a score, and does not generate.

    Raises:
        InvalidRequestError: what is learnt has no gradient, or needs one.
    """
    objective = body.objective
    if isinstance(objective, Pairs | Policy) and not body.takes_gradients:
        raise InvalidRequestError(
            f"objective.kind: {objective.kind} needs estimator.kind gradient.",
            param="estimator.kind",
        )
    if not body.takes_gradients:
        return None
    if isinstance(objective, Pairs):
        if has_score:
            return LossSpec(kind=LossKind.PAIRWISE, centring=objective.centring)
        return LossSpec(kind=LossKind.DPO, beta=objective.beta)
    if isinstance(objective, Policy):
        return LossSpec(
            kind=LossKind.POLICY,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            is_clipped=objective.clipped,
            kl=objective.kl,
        )
    measure = getattr(body.objective, "measure", None)
    if measure is None or measure is Measure.REWARD:
        raise without_gradient(body.objective.kind)
    if measure not in LOSSES:
        raise InvalidRequestError(
            f"objective.measure: {measure} has no gradient; estimator.kind two_sided learns by it.",
            param="objective.measure",
        )
    return LOSSES[measure]


def without_gradient(objective: str) -> InvalidRequestError:
    """Return the error of an objective whose loss is measured outside of the model."""
    return InvalidRequestError(
        f"objective.kind: {objective} has no gradient; estimator.kind two_sided learns by it.",
        param="objective.kind",
    )
