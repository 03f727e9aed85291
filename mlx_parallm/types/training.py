"""Plain values of training sessions, which travel between their state and the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mlx_parallm.types.gradients import GradientForm
from mlx_parallm.types.pooling import PoolingInput

if TYPE_CHECKING:
    import numpy as np


class Distribution(StrEnum):
    """Distribution of a direction's numbers; both have mean 0 and variance 1.

    rademacher: 1 or -1.
    gaussian: normal.
    """

    RADEMACHER = "rademacher"
    GAUSSIAN = "gaussian"


class FirstFactors(StrEnum):
    """Where the first factors of a session's adapter come from.

    random: drawn from the seed.
    activations: principal directions of what each layer gets on texts of the session's data.
    """

    RANDOM = "random"
    ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableSpec:
    """The adapter that a session trains: a LoRA (arXiv:2106.09685) of chosen linear layers.

    Attributes:
        targets: names of the linear layers in each of the model's layers: the ends of their paths,
            such as "query" or "attention.output.dense"; empty: all that can be trained.
        layers: indices of the model's layers, from 0; None: all of them.
        top: train only so many of the last layers, in place of ``layers``; None: all.
        rank: the rank of each change.
        alpha: the change is scaled by alpha / rank.
        trains_first: True to train the first factors too, False to keep them as they were drawn
            (LoRA-FA, arXiv:2308.03303).
        seed: draws the first factors, as PEFT does: uniformly in 1 / sqrt(inputs) around 0.
        init: where the first factors come from.
        paths: exact paths of linear layers, in place of ``targets``; empty: none.
        trains_head: True to train the model's classification head too, from its weights.
        makes_head: True to train a new head of one label, in place of the model's.
    """

    targets: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    top: int | None = None
    rank: int = 8
    alpha: float = 16.0
    trains_first: bool = False
    seed: int = 0
    init: FirstFactors = FirstFactors.RANDOM
    trains_head: bool = False
    makes_head: bool = False
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardSize:
    """Which forwards a device computes fast.

    Attributes:
        max_tokens: most tokens, padding included.
        cost: as many tokens as a forward costs besides its own.
    """

    max_tokens: int
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableInfo:
    """The facts about a session's adapter.

    Attributes:
        paths: the trained layers.
        num_parameters: how many numbers are trained.
        first_layer: index of the lowest trained layer; the layers before it compute the same in
            every step.
        num_layers: of the model.
        keeps_prefix: True if what enters the lowest trained layer is kept: it was asked for, there
            are layers before it, and a trial has shown that it changes no bit.
        shares_prompts: True if choices behind one prompt can share it; see ``ChoiceInput``.
        base: the SHA-256 of the model's weights, in hex.
        forwards: which forwards the device computes fast.
        gradients: how they are computed; None if the session takes none.
        arithmetic: what decides the bits of results: library, device, BLAS and threads.
    """

    paths: tuple[str, ...]
    num_parameters: int
    first_layer: int
    num_layers: int
    keeps_prefix: bool
    shares_prompts: bool
    base: str
    forwards: ForwardSize
    gradients: GradientForm | None = None
    arithmetic: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceInput:
    """A prompt of a decoder, and ways to continue it. Its result is how likely these are.

    Attributes:
        token_ids: the prompt, at least one token.
        choices: the tokens of each continuation, at least one; none if samples are judged.
        averages: True if the result is the mean log-probability of a choice's tokens, instead of
            their sum.
        shares: True if a forward may compute the prompt once for all choices.
        weights: a number of any sign for each token of each choice, which multiplies its
            log-probability; empty: all are 1.
        by_token: True if the result is the log-probability of each token of all choices, one
            choice after the other and without weights, instead of a number for each choice.
    """

    token_ids: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    averages: bool = False
    shares: bool = False
    weights: tuple[tuple[float, ...], ...] = ()
    by_token: bool = False

    @property
    def is_shared(self) -> bool:
        """True if all choices are one token, which the prompt's last token predicts."""
        return all(len(choice) == 1 for choice in self.choices)

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that are read: the prompt, or it with each choice but its last token."""
        if self.is_shared:
            return (self.token_ids,)
        return tuple((*self.token_ids, *branch) for branch in self.branches)

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that are read behind the prompt: each choice but its last token."""
        return tuple(choice[:-1] for choice in self.choices)


@dataclass(frozen=True, slots=True)
class BranchedText:
    """A prompt and what follows it, in several ways.

    Attributes:
        token_ids: the prompt, then all continuations.
        branches: how many tokens each continuation has.
    """

    token_ids: tuple[int, ...]
    branches: tuple[int, ...]


TrainingInput = PoolingInput | ChoiceInput
#: ``TrainedText`` is what the layers read for a row of a forward.
TrainedText = PoolingInput | BranchedText


def num_tokens(item: TrainingInput) -> int:
    """Return how many tokens a forward of an input has, without padding to other inputs."""
    if isinstance(item, PoolingInput):
        return len(item.token_ids)
    if item.shares:
        return len(item.token_ids) + sum(map(len, item.branches))
    return len(item.sequences) * max(map(len, item.sequences))


@dataclass(frozen=True, slots=True)
class PairResult:
    """The results of a forward of perturbed copies.

    Attributes:
        results: for each row of each segment, what the head gives; see ``Task``.
        lookups: texts whose states before the lowest trained layer were looked up.
        hits: those that were kept.
        frozen_tokens: tokens that were computed before the lowest trained layer, for texts that
            were not kept.
    """

    results: list[np.ndarray]
    lookups: int = 0
    hits: int = 0
    frozen_tokens: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """A perturbed copy of the parameters, for itself.

    Attributes:
        seed: draws the directions of a step.
        num_directions: how many.
        direction: index of the direction; None for the parameters themselves.
        sign: of the perturbation, 1 or -1.
        epsilon: its size.
    """

    seed: int
    num_directions: int
    direction: int | None
    sign: int
    epsilon: float


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
