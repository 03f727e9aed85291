"""Records of a training session on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from mlx_parallm.training.batches import BatchOrder
from mlx_parallm.training.estimators import EstimatorSettings, Sides
from mlx_parallm.training.objectives import Measure
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import (
    ChoiceInput,
    Distribution,
    FirstFactors,
    ForwardSize,
    TrainableSpec,
    TrainingInput,
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
        estimator: how gradients are estimated, and steps made of them.
        measure: the loss to minimise; None: the one that the caller reports.
        objective: how rows of data are read, as the caller gave it; plain JSON.
        batch_size: examples of a step.
        order: how batches are drawn.
        mode: how forwards are computed.
        max_tokens: most tokens of a forward; None: what the device computes fast.
        seed: draws the batches and the directions.
        adapter: the name of the adapter that it started from; None: of none.
        created_at: Unix seconds.
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

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> SessionConfig:
        """Return what ``to_json`` was given."""
        spec, estimator = stored["trainable"], stored["estimator"]
        layers = spec["layers"]
        return cls(
            **{
                **stored,
                "trainable": TrainableSpec(
                    **{
                        **spec,
                        "targets": tuple(spec["targets"]),
                        "layers": None if layers is None else tuple(layers),
                        "paths": tuple(spec.get("paths", ())),
                        "init": FirstFactors(spec.get("init", FirstFactors.RANDOM)),
                    }
                ),
                "estimator": EstimatorSettings(
                    **{
                        **estimator,
                        "sides": Sides(estimator["sides"]),
                        "distribution": Distribution(estimator["distribution"]),
                    }
                ),
                "measure": stored["measure"] and Measure(stored["measure"]),
                "order": BatchOrder(stored["order"]),
                "mode": Mode(stored["mode"]),
            }
        )


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
    """

    status: Status = Status.READY
    reason: str | None = None
    base: str | None = None
    forwards: ForwardSize | None = None
    until: int = 0
    published: tuple[str, ...] = ()
    asked_at: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> SessionState:
        """Return what ``to_json`` was given."""
        state = cls(**{**stored, "published": tuple(stored["published"])})
        forwards = None if state.forwards is None else ForwardSize(**stored["forwards"])
        return replace(state, status=Status(state.status), forwards=forwards)


@dataclass(frozen=True, slots=True)
class Example:
    """An input of the model.

    Attributes:
        input: see the class.
        label: the index of its right label; 0 for a prompt whose samples are judged.
        metadata: passed to the verifier with the prompt; None: nothing.
    """

    input: TrainingInput
    label: int
    metadata: Mapping[str, Any] | None = None

    def sharing(self, shares: bool) -> Example:
        """Return it with choices that share their prompt, or not."""
        if not isinstance(self.input, ChoiceInput) or self.input.shares == shares:
            return self
        return replace(self, input=replace(self.input, shares=shares))

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        item = self.input
        if isinstance(item, ChoiceInput):
            more = {} if self.metadata is None else {"metadata": self.metadata}
            stored = {
                "token_ids": item.token_ids,
                "choices": item.choices,
                "averages": item.averages,
            }
            return {**stored, "label": self.label, **more}
        return {
            "token_ids": item.token_ids,
            "task": item.task,
            "second_at": item.second_at,
            "places": item.places,
            "candidates": item.candidates,
            "num_unattended": item.num_unattended,
            "label": self.label,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Example:
        """Return what ``to_json`` was given."""
        fields = dict(stored)
        label = fields.pop("label")
        if "choices" in fields:
            choices = tuple(tuple(choice) for choice in fields["choices"])
            ids = tuple(fields["token_ids"])
            item = ChoiceInput(ids, choices, fields["averages"])
            return cls(item, label, fields.get("metadata"))
        tuples = {name: tuple(fields[name]) for name in ("token_ids", "places", "candidates")}
        return cls(PoolingInput(**{**fields, **tuples}), label)


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
        return Costs(
            lookups=self.lookups + other.lookups,
            hits=self.hits + other.hits,
            layer_tokens=self.layer_tokens + other.layer_tokens,
            naive_layer_tokens=self.naive_layer_tokens + other.naive_layer_tokens,
            seconds=self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Costs):
    """A step that was made.

    Attributes:
        step: its number, from 1: how many steps the session has made with it.
        seed: draws its directions.
        loss_plus: see ``Estimate``.
        loss_minus: likewise.
        gradients: the projected gradient along each direction.
        mean_square: see ``Estimator``; a session that goes on needs it.
    """

    step: int
    seed: int
    loss_plus: float
    loss_minus: float
    gradients: tuple[float, ...]
    mean_square: float | None

    @property
    def is_zero(self) -> bool:
        """True if the step changed nothing, because all losses were equal."""
        return not any(self.gradients)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> StepRecord:
        """Return what ``to_json`` was given."""
        return cls(**{**stored, "gradients": tuple(stored["gradients"])})
