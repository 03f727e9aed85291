"""The training sessions of one model: their parameters, and the ops that they are asked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.errors import ConflictError, InvalidRequestError, SessionLostError
from mlx_parallm.types.training import (
    Distribution,
    ForwardSize,
    Perturbation,
    Segment,
    Step,
    TrainableInfo,
    TrainableSpec,
)
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.lora.adapted_layers import find_module
from mlx_parallm.worker.lora.adapted_modules import kind_of, plain_shape
from mlx_parallm.worker.ops import (
    Done,
    Pending,
)
from mlx_parallm.worker.pooling.own_heads import TrainableHead
from mlx_parallm.worker.training.directions import (
    Copies,
    Directions,
    directions_of_stage,
    steps_along,
)
from mlx_parallm.worker.training.input_directions import InputDirections
from mlx_parallm.worker.training.pair_forwards import PairForwards
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.trainable import TrainableAdapter, TrainedLayer
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    CloseTraining,
    ForgetTraining,
    Materialise,
    MeasureInputs,
    OpenTraining,
    PairForward,
)

TrainingOp = (
    OpenTraining
    | MeasureInputs
    | PairForward
    | ApplySteps
    | Materialise
    | CloseTraining
    | ForgetTraining
)
# CPU_FORWARDS, GPU_FORWARDS: a forward costs a CPU the calls of its operations, and a GPU its
# launches and the preparation of new shapes. On an H200, one forward of 64 texts of RoBERTa-large,
# padded to the longest, takes less time than two forwards of 0.6 times its tokens.
CPU_FORWARDS = ForwardSize(max_tokens=4096, cost=48)
GPU_FORWARDS = ForwardSize(max_tokens=16_384, cost=8192)
#: ``PART_BYTES``: what is hashed in one stage, so that streams do not wait for a whole model.
PART_BYTES = 8 << 20


class _Session:
    """One session's adapter, and the forwards of its copies."""

    def __init__(self, model: TrainedModel, op: OpenTraining, pool: PrefixPool | None) -> None:
        layers = trained_layers(model, op.spec)
        self.trainable = TrainableAdapter(
            layers,
            _first_factors(model, layers, op),
            scale=op.spec.alpha / op.spec.rank,
            trains_first=op.spec.trains_first,
            head=_head(model, op) if op.spec.trains_head else None,
            second_factors=_second_factors(model, layers, op),
            head_parameters=_arrays(op.head) if op.head else None,
        )
        self.forwards = PairForwards(model, self.trainable, pool)
        self.forwards.keep_prefix_if_exact(op.samples)
        self._shares_prompts = model.shares_prompts
        self.distribution: Distribution = op.distribution

    def info(self, num_layers: int, base: str) -> TrainableInfo:
        """Return facts about the adapter; see there for the arguments."""
        return TrainableInfo(
            paths=self.trainable.paths,
            num_parameters=self.trainable.num_parameters,
            first_layer=self.forwards.first_layer,
            num_layers=num_layers,
            keeps_prefix=self.forwards.pool is not None,
            shares_prompts=self._shares_prompts,
            base=base,
            forwards=CPU_FORWARDS if backend_name() == "cpu" else GPU_FORWARDS,
        )

    def copies(self, op: PairForward) -> Copies:
        """Return the perturbed parameters of each segment."""
        directions = self._directions(op.seed, op.num_directions)
        return Copies(self.trainable.theta, directions, op.segments, op.epsilon)

    def _directions(self, seed: int, count: int) -> Directions:
        return Directions(seed, count, self.trainable.num_parameters, self.distribution)

    def set_parameters(self, theta: mx.array) -> None:
        """Train these parameters from now on."""
        self.trainable.theta = theta

    def weights(self, theta: mx.array, perturbation: Perturbation | None) -> AdapterWeights:
        """Return the adapter with these parameters, perturbed as in the forwards of a step."""
        if perturbation is not None:
            directions = self._directions(perturbation.seed, perturbation.num_directions)
            copy = Segment(perturbation.direction, perturbation.sign, ())
            theta = Copies(theta, directions, [copy], perturbation.epsilon).value()[0]
        return self.trainable.weights(theta)


class _Replay:
    """Parameters after steps, along some directions in each stage. Implements ``Pending``.

    A log may have 100,000 steps, and a step many long directions: streams wait for neither.
    """

    def __init__(
        self, session: _Session, begin: mx.array, steps: Sequence[Step], end: Callable[[Any], Any]
    ) -> None:
        """Prepare.

        Args:
            session: whose steps they are.
            begin: the parameters before them, float32 ``[P]``.
            steps: in their order.
            end: returns the result for the parameters after them.
        """
        self._theta, self._end = begin, end
        self._work = steps_along(begin, steps, session.distribution)
        self._num_left = sum(max(1, len(step.coefficients)) for step in steps)
        self._per_stage = directions_of_stage(begin.size)

    @property
    def num_stages(self) -> int:
        return max(1, math.ceil(self._num_left / self._per_stage))

    def advance(self) -> None:
        for theta in islice(self._work, self._per_stage):
            self._theta, self._num_left = theta, self._num_left - 1
        mx.eval(self._theta)

    def wait(self) -> Any:
        while self._num_left:
            self.advance()
        return self._end(self._theta)


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
        self._sessions: dict[str, _Session] = {}
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
                return _Replay(session, session.trainable.theta, op.steps, session.set_parameters)
            case Materialise():
                session = self._session(op.session)
                trainable = session.trainable
                begin = trainable.theta if op.steps is None else trainable.start
                return _Replay(session, begin, op.steps or (), partial(self._weights, session, op))
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
        session = self._sessions[op.session] = _Session(self._model, op, pool)
        return session.info(len(self._model.layers), base)

    def _weights(self, session: _Session, op: Materialise, theta: mx.array) -> AdapterWeights:
        weights = session.weights(theta, op.perturbation)
        return self._model.of_checkpoint(weights) if op.of_checkpoint else weights

    def _directions(self, op: MeasureInputs) -> InputDirections:
        layers = trained_layers(self._model, op.spec)
        texts = [text for item in op.inputs for text in self._model.texts(item)]
        return InputDirections(self._model, layers, texts, first_factors(layers, op.spec.seed))

    def _session(self, name: str) -> _Session:
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


def trained_layers(model: TrainedModel, spec: TrainableSpec) -> list[TrainedLayer]:
    """Return the linear layers that a spec names.

    Raises:
        InvalidRequestError: the model has no such layers.
    """
    if spec.paths:
        return _named_layers(model, spec)
    chosen = {id(model.layers[index]) for index in _indices(len(model.layers), spec)}
    roots = [path for path, module in model.modules.items() if id(module) in chosen]
    paths = [
        path
        for path, module in model.modules.items()
        if kind_of(module) == "linear" and any(path.startswith(f"{root}.") for root in roots)
    ]
    if not spec.targets:
        paths = [path for path in paths if path not in model.shared]
        if not paths:
            raise InvalidRequestError(
                "trainable.layers: they have no linear layer.", param="trainable.layers"
            )
        return [_layer(model, path, spec.rank) for path in paths]
    named: dict[str, TrainedLayer] = {}
    for target in spec.targets:
        matching = [path for path in paths if path.endswith(f".{target}")]
        if not matching:
            known = sorted({_below(path, roots) for path in paths})
            raise InvalidRequestError(
                f"trainable.targets: these layers have no linear layer {target[:100]!r}; they have "
                f"{', '.join(known)}.",
                param="trainable.targets",
            )
        named |= {path: _layer(model, path, spec.rank) for path in matching}
    return list(named.values())


def _named_layers(model: TrainedModel, spec: TrainableSpec) -> list[TrainedLayer]:
    """Return the linear layers of a spec that has paths; raise as ``trained_layers`` does."""
    paths = [find_module(model.modules, path, param="adapter") for path in spec.paths]
    places = {id(layer): index for index, layer in enumerate(model.layers)}
    roots = {
        path: places[id(module)] for path, module in model.modules.items() if id(module) in places
    }
    owners = {
        path: next((index for root, index in roots.items() if path.startswith(f"{root}.")), None)
        for path in paths
    }
    outside = [path for path, owner in owners.items() if owner is None]
    if outside:
        raise InvalidRequestError(
            f"A session cannot start from this adapter: {outside[0]} is in none of the model's "
            "layers.",
            param="adapter",
        )
    is_chosen = spec.top is not None or spec.layers is not None
    if is_chosen and set(owners.values()) != set(_indices(len(model.layers), spec)):
        raise InvalidRequestError(
            "trainable.layers: the adapter has other ones; leave them out.",
            param="trainable.layers",
        )
    return [_layer(model, path, spec.rank) for path in paths]


def _indices(count: int, spec: TrainableSpec) -> Sequence[int]:
    """Return the indices of the chosen layers of a model; raise InvalidRequestError."""
    if spec.top is not None:
        if not 1 <= spec.top <= count:
            raise InvalidRequestError(
                f"trainable.layers: the model has {count} layers, and no {spec.top} at the top.",
                param="trainable.layers",
            )
        return range(count - spec.top, count)
    indices = range(count) if spec.layers is None else spec.layers
    unknown = [index for index in indices if not 0 <= index < count]
    if unknown:
        raise InvalidRequestError(
            f"trainable.layers: the model has layers 0 to {count - 1}, and no {unknown[0]}.",
            param="trainable.layers",
        )
    return indices


def _below(path: str, roots: Sequence[str]) -> str:
    """Return a path within its layer."""
    return next(path[len(root) + 1 :] for root in roots if path.startswith(f"{root}."))


def first_factors(layers: list[TrainedLayer], seed: int) -> dict[str, mx.array]:
    """Return random first factors ``[rank, inputs]`` by path; each depends on its path's place."""
    ordered = sorted(layers, key=lambda layer: layer.path)
    keys = mx.random.split(mx.random.key(seed), len(ordered))
    factors: dict[str, mx.array] = {}
    for layer, key in zip(ordered, keys, strict=True):
        most = layer.num_inputs**-0.5
        shape = [layer.rank, layer.num_inputs]
        factors[layer.path] = mx.random.uniform(-most, most, shape, key=key)
    return factors


def _first_factors(
    model: TrainedModel, layers: list[TrainedLayer], op: OpenTraining
) -> dict[str, mx.array]:
    """Return the first factors of a session that is opened.

    Raises:
        ConflictError: those that it brings are for other layers.
    """
    if op.factors is None:
        return first_factors(layers, op.spec.seed)
    shapes = {layer.path: (layer.rank, layer.num_inputs) for layer in layers}
    return _fitting(model, op.factors, shapes, op.model)


def _second_factors(
    model: TrainedModel, layers: list[TrainedLayer], op: OpenTraining
) -> dict[str, mx.array] | None:
    """Return the second factors of a session that is opened; None: zeros. Raise as above."""
    if op.second is None:
        return None
    shapes = {layer.path: (layer.rank, layer.num_outputs) for layer in layers}
    return _fitting(model, op.second, shapes, op.model)


def _fitting(
    model: TrainedModel,
    factors: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, int]],
    name: str,
) -> dict[str, mx.array]:
    """Return factors by the model's paths; raise ConflictError if they have other shapes."""
    named = {find_module(model.modules, path, param="adapter"): factors[path] for path in factors}
    if {path: array.shape for path, array in named.items()} != shapes:
        raise ConflictError(f"{name} has other layers than this session was trained on.")
    return {path: mx.array(array.astype(np.float32)) for path, array in named.items()}


def _head(model: TrainedModel, op: OpenTraining) -> TrainableHead:
    """Return the head of a model.

    Raises:
        InvalidRequestError: it has none to train, or the session starts from another one.
    """
    head = model.head
    if head is None:
        raise InvalidRequestError(
            "trainable.head: the model has no classification head.", param="trainable.head"
        )
    shapes = {name: array.shape for name, array in head.parameters.items()}
    if op.head and {name: array.shape for name, array in op.head.items()} != shapes:
        raise InvalidRequestError(
            "A session cannot start from this adapter: its head has other parameters than the "
            "model's.",
            param="adapter",
        )
    return head


def _arrays(parameters: Mapping[str, np.ndarray]) -> dict[str, mx.array]:
    return {name: mx.array(array) for name, array in parameters.items()}


def _layer(model: TrainedModel, path: str, rank: int) -> TrainedLayer:
    outputs, inputs = plain_shape(model.modules[path])
    return TrainedLayer(path=path, num_inputs=inputs, num_outputs=outputs, rank=rank)


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
