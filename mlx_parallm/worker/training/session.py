"""One training session of a model: its parameters, and what is computed with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.errors import ConflictError, InvalidRequestError
from mlx_parallm.types.training import (
    Distribution,
    ForwardSize,
    Perturbation,
    Segment,
    Step,
    TrainableInfo,
)
from mlx_parallm.worker.device.properties import arithmetic, backend_name
from mlx_parallm.worker.lora.adapted_layers import find_module
from mlx_parallm.worker.ops import Pending
from mlx_parallm.worker.pooling.own_heads import TrainableHead
from mlx_parallm.worker.training.directions import (
    Copies,
    Directions,
    directions_of_stage,
    steps_along,
)
from mlx_parallm.worker.training.frozen_prefix import FrozenPrefix
from mlx_parallm.worker.training.gradients.forwards import GradientForwards
from mlx_parallm.worker.training.layer_choice import first_factors, trained_layers
from mlx_parallm.worker.training.pair_forwards import PairForwards
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.trainable import TrainableAdapter, TrainedLayer
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.training_ops import OpenTraining, PairForward

# CPU_FORWARDS, GPU_FORWARDS: a forward costs a CPU the calls of its operations, and a GPU its
# launches and the preparation of new shapes. On an H200, one forward of 64 texts of RoBERTa-large,
# padded to the longest, takes less time than two forwards of 0.6 times its tokens.
CPU_FORWARDS = ForwardSize(max_tokens=4096, cost=48)
GPU_FORWARDS = ForwardSize(max_tokens=16_384, cost=8192)
# GRADIENT_COST: the forwards that the gradient of a layer costs: one before the head, one more of
# the layer, and two for what goes back through it.
GRADIENT_COST = 4
# WITHOUT_HEAD, HAS_SCORE: why a head cannot be trained, and why none is made.
WITHOUT_HEAD = "the model has no classification head"
HAS_SCORE = "only a model that reads texts takes a new head, and only if it has no score yet"


class TrainingSession:
    """One session's adapter, and the forwards of its copies."""

    def __init__(self, model: TrainedModel, op: OpenTraining, pool: PrefixPool | None) -> None:
        layers = trained_layers(model, op.spec)
        self.trainable = TrainableAdapter(
            layers,
            _first_factors(model, layers, op),
            scale=op.spec.alpha / op.spec.rank,
            trains_first=op.spec.trains_first,
            head=_head(model, op),
            second_factors=_second_factors(model, layers, op),
            head_parameters=_arrays(op.head) if op.head else None,
        )
        self.prefix = FrozenPrefix(model, layers, pool)
        self.forwards = PairForwards(model, self.trainable, self.prefix)
        parts = self.trainable.parts(self.trainable.theta[None])
        stacks, heads = self.trainable.stacks_of(parts), self.trainable.heads_of(parts)
        self.prefix.keep_if_exact(op.samples, stacks, heads)
        self._gradients = _gradients(model, self, op) if op.takes_gradients else None
        self._shares_prompts = model.shares_prompts
        self.distribution: Distribution = op.distribution

    def info(self, num_layers: int, base: str) -> TrainableInfo:
        """Return facts about the adapter; see there for the arguments."""
        forwards = CPU_FORWARDS if backend_name() == "cpu" else GPU_FORWARDS
        if self._gradients is not None:
            forwards = replace(forwards, max_tokens=forwards.max_tokens // GRADIENT_COST)
        return TrainableInfo(
            paths=self.trainable.paths,
            num_parameters=self.trainable.num_parameters,
            first_layer=self.prefix.first_layer,
            num_layers=num_layers,
            keeps_prefix=self.prefix.pool is not None,
            shares_prompts=self._shares_prompts,
            base=base,
            forwards=forwards,
            gradients=None if self._gradients is None else self._gradients.form,
            arithmetic=arithmetic(),
        )

    @property
    def gradients(self) -> GradientForwards:
        """The session's gradients; raise ConflictError if it takes none."""
        if self._gradients is None:
            raise ConflictError("The training session was opened without gradients.")
        return self._gradients

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


class Replay(Pending[Any]):
    """Parameters after steps, along some directions in each stage.

    A log may have 100,000 steps, and a step many long directions: streams wait for neither.
    """

    def __init__(
        self,
        session: TrainingSession,
        begin: mx.array,
        steps: Sequence[Step],
        end: Callable[[Any], Any],
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
    @override
    def num_stages(self) -> int:
        return max(1, math.ceil(self._num_left / self._per_stage))

    @override
    def advance(self) -> None:
        for theta in islice(self._work, self._per_stage):
            self._theta, self._num_left = theta, self._num_left - 1
        mx.eval(self._theta)

    @override
    def wait(self) -> Any:
        while self._num_left:
            self.advance()
        return self._end(self._theta)


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


def _head(model: TrainedModel, op: OpenTraining) -> TrainableHead | None:
    """Return the head that a session trains, the model's or a new one; None if it trains none.

    Raises:
        InvalidRequestError: there is none to train, or the session starts from another one.
    """
    spec = op.spec
    if not spec.trains_head and not spec.makes_head:
        return None
    head = model.new_head(spec.seed) if spec.makes_head else model.head
    if head is None:
        why = HAS_SCORE if spec.makes_head else WITHOUT_HEAD
        raise InvalidRequestError(f"trainable.head: {why}.", param="trainable.head")
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


def _gradients(model: TrainedModel, session: TrainingSession, op: OpenTraining) -> GradientForwards:
    """Return the gradients of a session, and set its parameters if its state is known.

    Raises:
        ConflictError: the state has another number of parameters.
        InvalidRequestError: the model has no gradient.
    """
    gradients = GradientForwards(model, session.trainable, session.prefix)
    gradients.choose_form(op.samples)
    if op.state is not None:
        count = session.trainable.num_parameters
        arrays = op.state.theta, op.state.first_moment, op.state.second_moment
        if any(array.shape != (count,) for array in arrays):
            raise ConflictError(f"{op.model} has other layers than this session was trained on.")
        session.trainable.theta = mx.array(op.state.theta.astype(np.float32))
        gradients.optimiser.restore(op.state)
    return gradients
