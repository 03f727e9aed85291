"""Results of training sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.client.results import read


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """A step that a session has made.

    Attributes:
        step: its number, from 1.
        seed: draws its directions.
        loss_plus: mean loss with sign 1.
        loss_minus: mean loss with sign -1, or without a perturbation.
        gradients: the projected gradient along each direction.
        lookups: number of texts that were looked up in the prefix cache.
        hits: number of those that it had.
        layer_tokens: number of computed tokens, times their layers.
        naive_layer_tokens: what ``mode="naive"`` computes for the same losses.
        forward_s: seconds that the forwards took.
        losses: if they were asked for: for each perturbed copy the loss of each example.
    """

    step: int
    seed: int
    loss_plus: float
    loss_minus: float
    gradients: Sequence[float]
    lookups: int
    hits: int
    layer_tokens: int
    naive_layer_tokens: int
    forward_s: float
    losses: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """A step that a session has made from a gradient.

    Attributes:
        step: its number, from 1.
        loss: mean loss of the batch.
        norm: of the gradient, before it was clipped.
        learning_rate: of the step.
        tokens: of the batch, without padding.
        facts: means of what else the loss reports, such as margins.
        validation_loss: mean loss of the validation data; None: not evaluated.
        validation_accuracy: share of them that is right; None too if nothing is right or wrong.
        lookups: see ``TrainingStep``.
        hits: likewise.
        layer_tokens: likewise.
        naive_layer_tokens: likewise.
        forward_s: seconds that forwards and gradients took.
        losses: if they were asked for: one list, of the loss of each example.
    """

    step: int
    loss: float
    norm: float
    learning_rate: float
    tokens: int
    facts: Mapping[str, float]
    validation_loss: float | None
    validation_accuracy: float | None
    lookups: int
    hits: int
    layer_tokens: int
    naive_layer_tokens: int
    forward_s: float
    losses: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """The costs of all steps of a session; see ``TrainingStep``.

    Attributes:
        num_zero_gradients: number of steps that changed nothing, because all losses were equal.
    """

    lookups: int
    hits: int
    layer_tokens: int
    naive_layer_tokens: int
    forward_s: float
    num_zero_gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSession:
    """A training session.

    Attributes:
        id: its id.
        model: the first name of the model.
        status: "ready", "running" or "paused".
        reason: why the server paused it; None if a request did.
        created_at: Unix seconds.
        step: number of steps that were made.
        until: number of steps after which the run in the background ends.
        num_examples: number of rows of its data.
        num_parameters: number of trained parameters; None, like the next three, if the server
            has restarted and the session has made no step since.
        trained_layers: paths of the linear layers that are trained.
        first_layer: the lowest trained layer.
        prefix_cache: "available" or "unavailable".
        base: SHA-256 of the weights that it trains on.
        published: names of the adapters that it has published.
        pending: names of the adapters whose losses it waits for.
        gradient_form: "staged": a layer at a time beside streams; "whole"; None: none are taken.
        checkpoints: steps that can be returned to; None: all of them, by the log.
        best: the step of the least validation loss; None: none was evaluated.
        warning: why it hardly learns, or has other bits; None: no reason is known.
        totals: costs of all steps.
        last: the latest step; None before the first.
        config: the settings.
    """

    id: str
    model: str
    status: str
    reason: str | None
    created_at: int
    step: int
    until: int
    num_examples: int
    num_parameters: int | None
    trained_layers: Sequence[str] | None
    first_layer: int | None
    prefix_cache: str | None
    base: str | None
    published: Sequence[str]
    pending: Sequence[str]
    gradient_form: str | None
    checkpoints: Sequence[int] | None
    best: int | None
    warning: str | None
    totals: TrainingTotals
    last: TrainingStep | GradientStep | None
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerturbedAdapter:
    """An adapter whose loss a session asks for.

    Attributes:
        name: adapter name to request until its loss is reported.
        direction: index of its direction; None: it is not perturbed.
        sign: of the perturbation, 1 or -1.
    """

    name: str
    direction: int | None
    sign: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Quality of the labels that a session's adapter predicts.

    Attributes:
        step: number of steps that the session had made.
        num_examples: number of rows.
        loss: mean loss.
        accuracy: share of the rows whose label is predicted; None if the rows have none.
        f1: macro F1; None as above.
    """

    step: int
    num_examples: int
    loss: float
    accuracy: float | None
    f1: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A step of a session that can be returned to.

    Attributes:
        step: number of steps; ``publish`` and ``adapter`` take it.
        digest: SHA-256 of the adapter's changes, as ``AdapterInfo`` has it.
    """

    step: int
    digest: str


# STEP_NAMES, TOTALS_NAMES: the names in answers of fields that are called otherwise.
STEP_NAMES = {"forward_s": "forward_time"}
TOTALS_NAMES = {**STEP_NAMES, "num_zero_gradients": "zero_gradient_steps"}


def step_of(answer: Mapping[str, Any]) -> TrainingStep:
    """Return a step in an answer, or an event of a session."""
    return read(TrainingStep, answer, STEP_NAMES)


def gradient_step_of(answer: Mapping[str, Any]) -> GradientStep:
    """Return a step from a gradient in an answer, or an event of a session."""
    return read(GradientStep, answer, STEP_NAMES)


def session_of(answer: Mapping[str, Any]) -> TrainingSession:
    """Return a session in an answer of ``/v1/training/sessions``."""
    totals = read(TrainingTotals, answer["totals"], TOTALS_NAMES)
    last = answer["last"]
    if last is not None:
        last = gradient_step_of(last) if "norm" in last else step_of(last)
    return read(TrainingSession, answer, totals=totals, last=last)


def perturbed_adapter_of(answer: Mapping[str, Any]) -> PerturbedAdapter:
    """Return an adapter in an answer of ``ask``."""
    return read(PerturbedAdapter, answer)


def evaluation_of(answer: Mapping[str, Any]) -> Evaluation:
    """Return the answer of an evaluation."""
    return read(Evaluation, answer)


def checkpoint_of(answer: Mapping[str, Any]) -> Checkpoint:
    """Return the answer of a checkpoint."""
    return read(Checkpoint, answer, {"digest": "adapter_sha256"})
