"""The training sessions of one model: their parameters, and the ops that they are asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.errors import SessionLostError
from mlx_parallm.types.training import (
    TrainableInfo,
)
from mlx_parallm.worker.ops import (
    Done,
    Pending,
)
from mlx_parallm.worker.training.input_directions import InputDirections
from mlx_parallm.worker.training.layer_choice import first_factors, trained_layers
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.session import Replay, TrainingSession
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.training_ops import (
    ApplyGradient,
    ApplySteps,
    CloseTraining,
    DropGradient,
    ForgetTraining,
    GradientForward,
    Materialise,
    MeasureInputs,
    OpenTraining,
    PairForward,
    ReadTraining,
)

TrainingOp = (
    OpenTraining
    | MeasureInputs
    | PairForward
    | ApplySteps
    | GradientForward
    | ApplyGradient
    | DropGradient
    | ReadTraining
    | Materialise
    | CloseTraining
    | ForgetTraining
)
#: ``PART_BYTES``: what is hashed in one stage, so that streams do not wait for a whole model.
PART_BYTES = 8 << 20


class _Opening:
    """A session that is being opened: first the model's weights are hashed, once for all sessions.

    Implements ``Pending``.
    """

    def __init__(self, digest: BaseDigest, finish: Callable[[str], TrainableInfo]) -> None:
        self._digest = digest
        self._finish = finish

    @property
    def num_stages(self) -> int:
        return 1 if self._digest.is_complete else 2

    def advance(self) -> None:
        self._digest.advance()

    def wait(self) -> TrainableInfo:
        return self._finish(self._digest.value())


class TrainingSessions:
    """The sessions of one model, by their names."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        #: What enters the lowest trained layers of all sessions.
        self.pool = PrefixPool(0)
        self._sessions: dict[str, TrainingSession] = {}
        self._digest: BaseDigest | None = None

    def begin(self, op: TrainingOp) -> Pending[Any]:
        """Begin an op; raise InvalidRequestError if it is refused."""
        match op:
            case OpenTraining():
                self._digest = self._digest or BaseDigest(self._model.parameters)
                return _Opening(self._digest, partial(self._open, op))
            case MeasureInputs():
                return self._directions(op)
            case PairForward():
                session = self._session(op.session)
                rows = [segment.rows for segment in op.segments]
                return session.forwards.begin(op.inputs, rows, session.copies(op), keeps=op.keeps)
            case ApplySteps():
                session = self._session(op.session)
                return Replay(session, session.trainable.theta, op.steps, session.set_parameters)
            case Materialise():
                session = self._session(op.session)
                trainable = session.trainable
                begin = trainable.theta if op.steps is None else trainable.start
                return Replay(session, begin, op.steps or (), partial(self._weights, session, op))
            case GradientForward() | ApplyGradient() | DropGradient() | ReadTraining():
                return self._go_down(op)
            case CloseTraining():
                self._sessions.pop(op.session, None)
                if not self._sessions:
                    self.pool.clear()
                return Done(None)
            case ForgetTraining():
                self.release()
                return Done(None)

    def _open(self, op: OpenTraining, base: str) -> TrainableInfo:
        pool = None
        if op.cache_bytes:
            pool = self.pool
            pool.max_bytes = op.cache_bytes
        session = self._sessions[op.session] = TrainingSession(self._model, op, pool)
        return session.info(len(self._model.layers), base)

    def _go_down(
        self, op: GradientForward | ApplyGradient | DropGradient | ReadTraining
    ) -> Pending[Any]:
        """Begin an op about a session's gradient."""
        session = self._session(op.session)
        gradients = session.gradients
        match op:
            case GradientForward():
                return gradients.begin(op)
            case ApplyGradient():
                return Done(gradients.apply(op))
            case DropGradient():
                gradients.drop()
                return Done(None)
            case ReadTraining():
                return Done(gradients.optimiser.arrays(session.trainable.theta))

    def _weights(
        self, session: TrainingSession, op: Materialise, theta: mx.array
    ) -> AdapterWeights:
        weights = session.weights(theta, op.perturbation)
        return self._model.of_checkpoint(weights) if op.of_checkpoint else weights

    def _directions(self, op: MeasureInputs) -> InputDirections:
        layers = trained_layers(self._model, op.spec)
        texts = [text for item in op.inputs for text in self._model.texts(item)]
        return InputDirections(self._model, layers, texts, first_factors(layers, op.spec.seed))

    def _session(self, name: str) -> TrainingSession:
        if name not in self._sessions:
            raise SessionLostError(f"The engine does not have the training session {name}.")
        return self._sessions[name]

    def recover(self) -> None:
        """Forget the states that forwards kept: those of one that failed may be among them."""
        self.pool.clear()

    def release(self) -> None:
        """Forget all sessions, because the model is unloaded, sleeps or has other weights."""
        self._sessions.clear()
        self.pool.clear()
        self._digest = None


class BaseDigest:
    """The SHA-256 of a model's parameters, computed in stages.

    It covers the name, dtype, shape and bytes of each parameter, in the order of their names.
    """

    def __init__(self, parameters: Mapping[str, mx.array]) -> None:
        self._digest = hashlib.sha256()
        self._parts = _parts(parameters)
        self._next = next(self._parts, None)

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to hash."""
        return self._next is None

    def advance(self) -> None:
        """Hash the next part, of at most ``PART_BYTES`` or a single row of a parameter."""
        assert self._next is not None, "a part is left"
        self._digest.update(self._next)
        self._next = next(self._parts, None)

    def value(self) -> str:
        """Hash what is left; return the digest in hex."""
        while not self.is_complete:
            self.advance()
        return self._digest.hexdigest()


def _parts(parameters: Mapping[str, mx.array]) -> Iterator[bytes]:
    for name, array in sorted(parameters.items()):
        yield f"{name} {array.dtype} {array.shape}\0".encode()
        rows = array if array.ndim else array[None]
        row_bytes = max(1, rows.nbytes // max(1, rows.shape[0]))
        step = max(1, PART_BYTES // row_bytes)
        for begin in range(0, rows.shape[0], step):
            part = mx.contiguous(rows[begin : begin + step])
            yield np.array(mx.view(part.reshape(-1), mx.uint8)).tobytes()
