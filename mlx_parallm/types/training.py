"""Plain values of training sessions, which travel between their state and the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Distribution(StrEnum):
    """How the numbers of a direction are distributed; both have mean 0 and variance 1.

    rademacher: 1 or -1.
    gaussian: normal.
    """

    RADEMACHER = "rademacher"
    GAUSSIAN = "gaussian"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableSpec:
    """The adapter that a session trains: a LoRA (arXiv:2106.09685) of chosen linear layers.

    Attributes:
        targets: names of the linear layers in each of the model's layers: the ends of their paths,
            such as "query" or "attention.output.dense".
        layers: indices of the model's layers, from 0; None: all of them.
        rank: the rank of each change.
        alpha: the change is scaled by alpha / rank.
        trains_first: True to train the first factors too, False to keep them as they were drawn
            (LoRA-FA, arXiv:2308.03303).
        seed: draws the first factors, as PEFT does: uniformly in 1 / sqrt(inputs) around 0.
    """

    targets: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    rank: int = 8
    alpha: float = 16.0
    trains_first: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableInfo:
    """The facts about a session's adapter.

    Attributes:
        paths: the trained layers.
        num_parameters: how many numbers are trained.
        first_layer: index of the lowest trained layer; the layers before it compute the same in
            every step.
    """

    paths: tuple[str, ...]
    num_parameters: int
    first_layer: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A perturbed copy of the parameters, and the inputs that it is tried on.

    Attributes:
        direction: index of the direction; None for the parameters themselves.
        sign: of the perturbation, 1 or -1.
        rows: indices of the inputs.
    """

    direction: int | None
    sign: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a session's log.

    Attributes:
        seed: draws the directions, from 0 to 2**64 - 1.
        coefficients: how far the parameters went against each direction.
        keep: the factor of weight decay.
    """

    seed: int
    coefficients: Sequence[float]
    keep: float = 1.0
