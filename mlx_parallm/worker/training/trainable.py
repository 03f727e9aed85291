"""The trainable adapter: the factors of chosen linear layers as one flat vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.worker.pooling.own_heads import TrainableHead
from mlx_parallm.worker.training.segment_stack import SegmentStack


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedLayer:
    """A linear layer that a session trains.

    Attributes:
        path: its path in the model.
        num_inputs: length of its input.
        num_outputs: length of its output.
        rank: rank of its change.
    """

    path: str
    num_inputs: int
    num_outputs: int
    rank: int


class TrainableAdapter:
    """A LoRA (arXiv:2106.09685) whose trained factors are one vector θ, float32 ``[P]``.

    Perturbed copies are the rows of a matrix ``[S, P]``; their factors are views of it. With frozen
    first factors (LoRA-FA, arXiv:2308.03303) only the second factors are trained. The parameters of
    a trained head come after all factors.

    Attributes:
        layers: the trained layers, in the order of their factors in θ.
        num_parameters: P.
        start: the parameters at the beginning.
        theta: the parameters now.
    """

    def __init__(
        self,
        layers: Sequence[TrainedLayer],
        first_factors: Mapping[str, mx.array],
        *,
        scale: float,
        trains_first: bool,
        head: TrainableHead | None = None,
        second_factors: Mapping[str, mx.array] | None = None,
        head_parameters: Mapping[str, mx.array] | None = None,
    ) -> None:
        """Begin with the parameters at the start.

        Args:
            layers: the trained layers.
            first_factors: for each layer's path, float32 ``[rank, num_inputs]``.
            scale: the factor of the product of both factors.
            trains_first: True to train the first factors too, from these values.
            head: a head that is trained too.
            second_factors: for each layer's path, float32 ``[rank, num_outputs]``; None: zeros, so
                that the adapter changes nothing yet.
            head_parameters: the first ones of the head, by name; None: its own.
        """
        self.layers = tuple(sorted(layers, key=lambda layer: layer.path))
        self._scale = scale
        self._trains_first = trains_first
        self._head = head
        self._second = second_factors or {}
        self._first = {layer.path: first_factors[layer.path] for layer in self.layers}
        factors = [part for layer in self.layers for part in self._start(layer)]
        own = {} if head is None else head.parameters
        parts = [*factors, *((head_parameters or own)[name] for name in own)]
        self._shapes = [part.shape for part in parts]
        self.start = mx.concatenate([part.reshape(-1) for part in parts])
        self.theta = self.start
        self.num_parameters: int = self.theta.size

    def _start(self, layer: TrainedLayer) -> list[mx.array]:
        """Return the layer's parts of the first θ."""
        first = [self._first[layer.path]] if self._trains_first else []
        return [*first, self._second.get(layer.path, mx.zeros((layer.rank, layer.num_outputs)))]

    def parts(self, copies: mx.array) -> list[mx.array]:
        """Return the arrays in perturbed copies, float32 ``[S, P]``, as views ``[S, ...]``."""
        views: list[mx.array] = []
        at = 0
        for shape in self._shapes:
            end = at + math.prod(shape)
            views.append(copies[:, at:end].reshape(-1, *shape))
            at = end
        return views

    def stacks(self, copies: mx.array) -> dict[str, SegmentStack]:
        """Return the changes of each layer by perturbed copies, float32 ``[S, P]``, by its path."""
        return self.stacks_of(self.parts(copies))

    def stacks_of(self, parts: Sequence[mx.array]) -> dict[str, SegmentStack]:
        """Return the changes of each layer by its path; see ``parts``."""
        rest = iter(parts)
        stacks: dict[str, SegmentStack] = {}
        for layer in self.layers:
            a = next(rest) if self._trains_first else self._first[layer.path]
            stacks[layer.path] = SegmentStack(a, next(rest), self._scale)
        return stacks

    @property
    def owners(self) -> tuple[str, ...]:
        """The path of the trained layer that each part belongs to, or the parameter of a head."""
        count = 2 if self._trains_first else 1
        head = () if self._head is None else tuple(self._head.parameters)
        return (*(layer.path for layer in self.layers for _ in range(count)), *head)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the trained layers, those of the head last."""
        head = () if self._head is None else self._head.paths
        return (*(layer.path for layer in self.layers), *head)

    def heads(self, copies: mx.array) -> list[Any]:
        """Return a model for each perturbed copy, float32 ``[S, P]``, that has its head.

        Return none if no head is trained.
        """
        return self.heads_of(self.parts(copies))

    def heads_of(self, parts: Sequence[mx.array]) -> list[Any]:
        """Return a model for each copy that has its head; see ``parts``."""
        if self._head is None:
            return []
        return [
            self._head.model(self._head_parameters(parts, copy)) for copy in range(len(parts[-1]))
        ]

    def _head_parameters(self, parts: Sequence[mx.array], copy: int = 0) -> dict[str, mx.array]:
        """Return the parameters of a copy's head by name; see ``parts``."""
        own = () if self._head is None else tuple(self._head.parameters)
        last = parts[len(parts) - len(own) :]
        return {name: part[copy] for name, part in zip(own, last, strict=True)}

    def weights(self, theta: mx.array) -> AdapterWeights:
        """Return the adapter with these parameters, float32 ``[P]``; it can be served."""
        parts = self.parts(theta[None])
        stacks = self.stacks_of(parts)
        changes: dict[str, LowRank] = {}
        for path, stack in stacks.items():
            a = stack.a[0] if self._trains_first else stack.a
            changes[path] = LowRank(
                kind="linear",
                a=to_host(a),
                b=to_host(mx.contiguous(stack.b[0].T)),
                scale=self._scale,
            )
        saved = {name: to_host(array) for name, array in self._head_parameters(parts).items()}
        return AdapterWeights(changes, saved, None if self._head is None else self._head.task_type)
