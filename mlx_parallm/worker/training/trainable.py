"""The trainable adapter: the factors of chosen linear layers as one flat vector."""

from __future__ import annotations

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
        self._num_factors = sum(part.size for part in factors)
        own = {} if head is None else head.parameters
        parameters = [(head_parameters or own)[name].reshape(-1) for name in own]
        self.start = mx.concatenate([*factors, *parameters])
        self.theta = self.start
        self.num_parameters: int = self.theta.size

    def _start(self, layer: TrainedLayer) -> list[mx.array]:
        """Return the layer's parts of the first θ, each ``[n]``."""
        first = [self._first[layer.path].reshape(-1)] if self._trains_first else []
        second = self._second.get(layer.path, mx.zeros((layer.rank, layer.num_outputs)))
        return [*first, second.reshape(-1)]

    def stacks(self, copies: mx.array) -> dict[str, SegmentStack]:
        """Return the changes of each layer by perturbed copies, float32 ``[S, P]``, by its path."""
        stacks: dict[str, SegmentStack] = {}
        at = 0
        for layer in self.layers:
            a = self._first[layer.path]
            if self._trains_first:
                a, at = _view(copies, at, layer.rank, layer.num_inputs)
            b, at = _view(copies, at, layer.rank, layer.num_outputs)
            stacks[layer.path] = SegmentStack(a, b, self._scale)
        return stacks

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the trained layers, those of the head last."""
        head = () if self._head is None else self._head.paths
        return (*(layer.path for layer in self.layers), *head)

    def heads(self, copies: mx.array) -> list[Any]:
        """Return a model for each perturbed copy, float32 ``[S, P]``, that has its head.

        Return none if no head is trained.
        """
        if self._head is None:
            return []
        return [self._head.model(self._head_parameters(copy)) for copy in copies]

    def _head_parameters(self, theta: mx.array) -> dict[str, mx.array]:
        """Return the parameters of the head in θ, float32 ``[P]``, by name."""
        parameters: dict[str, mx.array] = {}
        at = self._num_factors
        own = {} if self._head is None else self._head.parameters
        for name, array in own.items():
            parameters[name] = theta[at : at + array.size].reshape(array.shape)
            at += array.size
        return parameters

    def weights(self, theta: mx.array) -> AdapterWeights:
        """Return the adapter with these parameters, float32 ``[P]``; it can be served."""
        stacks = self.stacks(theta[None])
        changes: dict[str, LowRank] = {}
        for path, stack in stacks.items():
            a = stack.a[0] if self._trains_first else stack.a
            changes[path] = LowRank(
                kind="linear",
                a=to_host(a),
                b=to_host(mx.contiguous(stack.b[0].T)),
                scale=self._scale,
            )
        saved = {name: to_host(array) for name, array in self._head_parameters(theta).items()}
        return AdapterWeights(changes, saved, None if self._head is None else self._head.task_type)


def _view(copies: mx.array, at: int, rank: int, length: int) -> tuple[mx.array, int]:
    """Return factors ``[S, rank, length]`` that begin at a column, and the column after them."""
    end = at + rank * length
    return copies[:, at:end].reshape(-1, rank, length), end
