"""Records of a training session on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from typing_extensions import override

from mlx_parallm.storage.records import as_fields, as_record
from mlx_parallm.training.batches import BatchOrder
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.settings import EstimatorSettings, GradientSettings
from mlx_parallm.types.gradients import LossSpec, LossTarget
from mlx_parallm.types.training import (
    ChoiceInput,
    ForwardSize,
    TrainableSpec,
    TrainingInput,
    num_tokens,
)


class Mode(StrEnum):
    """Computation of a step's forwards; the losses are the same.

    paired: all copies in one forward, cut by length, from states that are kept.
    naive: one forward for each copy, of all layers, padded to the longest: for comparison.
    """

    PAIRED = "paired"
    NAIVE = "naive"


class Status(StrEnum):
    """Background runs of a session.

    ready: no.
    running: yes, in the background.
    paused: no, until it is resumed; ``SessionState.reason`` says why if it was not asked for.
    """

    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """The settings of a session, which never change.

    Attributes:
        id: unique.
        model: the first name of the model.
        trainable: the adapter.
        estimator: how gradients are had, and steps made of them.
        measure: the loss to minimise; None: the one that the caller reports.
        objective: how rows of data are read, as the caller gave it; plain JSON.
        batch_size: examples of a step.
        order: how batches are drawn.
        mode: how forwards are computed.
        max_tokens: most tokens of a forward; None: what the device computes fast.
        seed: draws the batches and the directions.
        adapter: the name of the adapter that it started from; None: of none.
        created_at: Unix seconds.
        loss: of which gradients are taken; None: the measure says it.
        eval_every: steps between two evaluations of the validation data; None: an epoch.
    """

    id: str
    model: str
    trainable: TrainableSpec
    estimator: EstimatorSettings
    measure: Measure | None
    objective: Mapping[str, Any]
    batch_size: int
    order: BatchOrder
    mode: Mode
    max_tokens: int | None
    seed: int
    created_at: int
    adapter: str | None = None
    loss: LossSpec | None = None
    eval_every: int | None = None

    @property
    def record_kind(self) -> type[StepRecord]:
        """Return the type of the records of its steps."""
        return GradientRecord if isinstance(self.estimator, GradientSettings) else MezoRecord


@dataclass(frozen=True, slots=True)
class SessionState:
    """The state of a session.

    Attributes:
        status: see the class.
        reason: why the server paused it; None if a request did.
        base: the SHA-256 of the weights that it trains on; None before it was opened.
        forwards: the sizes of its forwards; None before it was opened. They stay the same, because
            the bits of a result depend on them.
        until: the number of steps after which a run in the background ends.
        published: names of adapters that it has published.
        asked_at: the number of steps when losses were asked for; None, or less than the session has
            made: none are pending.
        notice: why its steps may have other bits than those of an undisturbed session; None: they
            have not.
    """

    status: Status = Status.READY
    reason: str | None = None
    base: str | None = None
    forwards: ForwardSize | None = None
    until: int = 0
    published: tuple[str, ...] = ()
    asked_at: int | None = None
    notice: str | None = None


# OWN_FIELDS: fields of an example besides those of its input.
OWN_FIELDS = ("label", "metadata", "other", "target")


@dataclass(frozen=True, slots=True)
class Example:
    """An input of the model.

    Attributes:
        input: see the class.
        label: the index of its right label; 0 for a prompt whose samples are judged.
        metadata: passed to the verifier with the prompt; None: nothing.
        other: the input that this one is preferred to, of models with a score; None: there is none.
        target: the facts that make its loss; None: the label does.
    """

    input: TrainingInput
    label: int
    metadata: Mapping[str, Any] | None = None
    other: TrainingInput | None = None
    target: LossTarget | None = None

    @property
    def loss_target(self) -> LossTarget:
        """Return the facts that make its loss."""
        return LossTarget(label=self.label) if self.target is None else self.target

    @property
    def inputs(self) -> list[TrainingInput]:
        """Return all of its inputs."""
        return [self.input] if self.other is None else [self.input, self.other]

    @property
    def num_tokens(self) -> int:
        """Return how many tokens a forward of it has, without padding to other examples."""
        return len(self.inputs) * max(map(num_tokens, self.inputs))

    def sharing(self, shares: bool) -> Example:
        """Return it with choices that share their prompt, or not."""
        if not isinstance(self.input, ChoiceInput) or self.input.shares == shares:
            return self
        return replace(self, input=replace(self.input, shares=shares))

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object: the fields of its input, and its own."""
        own = {name: value for name, value in as_fields(self).items() if value is not None}
        return as_fields(own.pop("input")) | own

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Example:
        """Return what ``to_json`` returned; raise TypeError or ValueError if it did not."""
        item = dict(stored)
        own = {name: item.pop(name) for name in OWN_FIELDS if name in item}
        return as_record(own | {"input": item}, Example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Cost of a step.

    Attributes:
        lookups: texts that were looked up in the prefix cache.
        hits: those that it had.
        layer_tokens: tokens that were computed, times the layers that computed them.
        naive_layer_tokens: what ``Mode.NAIVE`` computes for the same losses.
        seconds: from the request of its forwards to their results.
    """

    lookups: int = 0
    hits: int = 0
    layer_tokens: int = 0
    naive_layer_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        """Return the costs of both together."""
        names = (each.name for each in fields(Costs))
        return Costs(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Costs):
    """A step that was made.

    Attributes:
        step: its number, from 1: how many steps the session has made with it.
    """

    step: int

    @property
    def is_zero(self) -> bool:
        """True if the step changed nothing."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class MezoRecord(StepRecord):
    """A step that was made from losses.

    Attributes:
        seed: draws its directions.
        loss_plus: see ``Estimate``.
        loss_minus: likewise.
        gradients: the projected gradient along each direction.
        mean_square: see ``Estimator``; a session that goes on needs it.
    """

    seed: int
    loss_plus: float
    loss_minus: float
    gradients: tuple[float, ...]
    mean_square: float | None

    @property
    @override
    def is_zero(self) -> bool:
        """True if the step changed nothing, because all losses were equal."""
        return not any(self.gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRecord(StepRecord):
    """A step that was made from a gradient.

    Attributes:
        loss: mean over the examples of the step.
        norm: of the gradient, before it was clipped.
        learning_rate: of the step.
        tokens: those of the examples, padding excluded.
        arithmetic: see ``TrainableInfo``.
        is_given: True if the caller gave the examples; the step cannot be made again.
        facts: means over the examples of what else the loss reports, by name.
        validation_loss: of the session's validation data after the step; None: not evaluated.
        validation_accuracy: likewise; None too if nothing is right or wrong.
    """

    loss: float
    norm: float
    learning_rate: float
    tokens: int
    arithmetic: str
    is_given: bool = False
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    validation_loss: float | None = None
    validation_accuracy: float | None = None

    @property
    @override
    def is_zero(self) -> bool:
        """True if the gradient was 0."""
        return self.norm == 0
