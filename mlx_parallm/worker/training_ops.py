"""The ops of training sessions; see ``ops``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.gradients import (
    GradientResult,
    LossSpec,
    LossTarget,
    OptimiserSettings,
    TrainingArrays,
)
from mlx_parallm.types.training import (
    Distribution,
    PairResult,
    Perturbation,
    Segment,
    TrainableInfo,
    TrainableSpec,
    TrainingInput,
)
from mlx_parallm.types.training import Step as TrainingStep
from mlx_parallm.worker.ops import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTraining(Op[TrainableInfo]):
    """Make the adapter of a training session, which changes nothing yet; return facts about it.

    Later ops about the session raise SessionLostError once the model has been loaded anew. This one
    raises InvalidRequestError if the model has no such layers.

    Attributes:
        model: the model.
        session: the name by which later ops call the session.
        spec: the adapter.
        distribution: of the directions along which it is trained.
        cache_bytes: most memory of what enters the lowest trained layers, which is kept for all
            sessions of the model; 0 keeps none for this one.
        samples: inputs with which it is tried whether that changes no bit.
        factors: the first factors by path, float32 ``[rank, inputs]``; None: they are drawn.
        second: the second factors by path, float32 ``[rank, outputs]``; None: zeros.
        head: the parameters of a trained head by name, float32; None: the model's own.
        takes_gradients: True if gradients are taken: it is tried with the samples how they can be
            computed. InvalidRequestError is raised if the model has none.
        state: parameters and moments to go on from; None: those of the beginning.
    """

    model: str
    session: str
    spec: TrainableSpec
    distribution: Distribution
    cache_bytes: int = 256 << 20
    samples: Sequence[TrainingInput] = ()
    factors: Mapping[str, np.ndarray] | None = None
    second: Mapping[str, np.ndarray] | None = None
    head: Mapping[str, np.ndarray] | None = None
    takes_gradients: bool = False
    state: TrainingArrays | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureInputs(Op[dict[str, np.ndarray]]):
    """Return first factors for ``OpenTraining``: principal directions of what the layers get.

    Their signs, and directions of like size, may differ between devices, so the result must be kept
    to have the same adapter again.

    Attributes:
        model: the model.
        session: the session, which may not be open.
        spec: the adapter.
        inputs: at least one, whose texts are run.
    """

    model: str
    session: str
    spec: TrainableSpec
    inputs: Sequence[TrainingInput]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairForward(Op[PairResult]):
    """Run inputs through perturbed copies of a session's adapter, all copies in one forward.

    Attributes:
        model: the model.
        session: the session.
        inputs: name no adapters.
        segments: the copies; all have equally many rows.
        seed: draws the directions.
        num_directions: how many.
        epsilon: the size of the perturbation.
        keeps: True to keep what enters the lowest trained layer, for later forwards; what is kept
            already is used in any case.
    """

    model: str
    session: str
    inputs: Sequence[TrainingInput]
    segments: Sequence[Segment]
    seed: int
    num_directions: int
    epsilon: float
    keeps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplySteps(Op[None]):
    """Change the parameters of a session by steps, in their order."""

    model: str
    session: str
    steps: Sequence[TrainingStep]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientForward(Op[GradientResult]):
    """Add the gradient of ``sum(losses) / divisor`` to the session's, and return the losses.

    The session must take gradients. Gradients are added in the order of their ops; if one fails,
    nothing is added. Beside streams a stage is one layer, forwards or backwards; see
    ``GradientForm``.

    Attributes:
        model: the model.
        session: the session.
        inputs: of a micro-batch, naming no adapters; see ``LossKind.inputs_per_row``.
        loss: the loss of a row.
        targets: of each row.
        divisor: of the summed losses, such as the number of rows or tokens of the whole step.
        keeps: as in ``PairForward``.
    """

    model: str
    session: str
    inputs: Sequence[TrainingInput]
    loss: LossSpec
    targets: Sequence[LossTarget]
    divisor: float
    keeps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyGradient(Op[float]):
    """Change the parameters by the session's gradient, drop it, and return its unclipped norm.

    Raises ConflictError if there is no gradient, or if it or the new parameters are not finite:
    then the gradient is dropped, and nothing else changes.

    Attributes:
        model: the model.
        session: the session.
        number: of the step, from 1; it corrects the bias of the moments.
        learning_rate: of this step.
        settings: of the optimiser.
    """

    model: str
    session: str
    number: int
    learning_rate: float
    settings: OptimiserSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGradient(Op[None]):
    """Drop what was added to the session's gradient, because its step is not made."""

    model: str
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTraining(Op[TrainingArrays]):
    """Return the session's parameters and moments; these are zeros before the first gradient."""

    model: str
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Materialise(Op[AdapterWeights]):
    """Return a session's adapter, with which the model can serve requests.

    Attributes:
        model: the model.
        session: the session.
        steps: the adapter after these steps from its beginning; None: as it is.
        perturbation: of its parameters; None: they are not perturbed.
        of_checkpoint: True: as changes of the weights that transformers holds, by its paths, which
            the model need not have.
    """

    model: str
    session: str
    steps: Sequence[TrainingStep] | None = None
    perturbation: Perturbation | None = None
    of_checkpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTraining(Op[None]):
    """Forget a session; unknown ones are ignored."""

    model: str
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetTraining(Op[None]):
    """Forget all sessions of a model, and what they keep: its weights change, or it sleeps."""

    model: str
