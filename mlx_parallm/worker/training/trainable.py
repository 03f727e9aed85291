"""The trainable adapter: the factors of chosen linear layers as one flat vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
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
    first factors (LoRA-FA, arXiv:2308.03303) only the second factors are trained.

    Attributes:
        layers: the trained layers, in the order of their factors in θ.
        num_parameters: P.
        theta: the parameters now.
    """

    def __init__(
        self,
        layers: Sequence[TrainedLayer],
        first_factors: Mapping[str, mx.array],
        *,
        scale: float,
        trains_first: bool,
    ) -> None:
        """Begin with second factors of zeros, so that the adapter changes nothing yet.

        Args:
            layers: the trained layers.
            first_factors: for each layer's path, float32 ``[rank, num_inputs]``.
            scale: the factor of the product of both factors.
            trains_first: True to train the first factors too, from these values.
        """
        self.layers = tuple(sorted(layers, key=lambda layer: layer.path))
        self._scale = scale
        self._trains_first = trains_first
        self._first = {layer.path: first_factors[layer.path] for layer in self.layers}
        #: The parameters at the beginning.
        self.start = mx.concatenate([part for layer in self.layers for part in self._start(layer)])
        self.theta = self.start
        self.num_parameters: int = self.theta.size

    def _start(self, layer: TrainedLayer) -> list[mx.array]:
        """Return the layer's parts of the first θ, each ``[n]``."""
        first = [self._first[layer.path].reshape(-1)] if self._trains_first else []
        return [*first, mx.zeros(layer.rank * layer.num_outputs)]

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
        return AdapterWeights(changes)


def _view(copies: mx.array, at: int, rank: int, length: int) -> tuple[mx.array, int]:
    """Return factors ``[S, rank, length]`` that begin at a column, and the column after them."""
    end = at + rank * length
    return copies[:, at:end].reshape(-1, rank, length), end
