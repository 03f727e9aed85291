"""A pass over a micro-batch: what its gradient is computed from, as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_parallm.types.training import TrainingInput
from mlx_parallm.worker.pooling.layer_stages import StagedJob
from mlx_parallm.worker.training.frozen_prefix import FrozenPrefix
from mlx_parallm.worker.training.trainable import TrainableAdapter
from mlx_parallm.worker.training.trained_model import TrainedModel

#: ``Objective`` returns a scalar, and arrays that are returned with the gradient, from results.
Objective = Callable[[Sequence[mx.array]], tuple[mx.array, Mapping[str, mx.array]]]


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient, and what was computed with it.

    Attributes:
        parts: of each part of the parameters; see ``TrainableAdapter.parts``.
        arrays: those that the objective returned.
    """

    parts: Sequence[mx.array]
    arrays: Mapping[str, mx.array]

    def flat(self) -> mx.array:
        """Return the gradient, float32 ``[P]``."""
        return mx.concatenate([part.reshape(-1) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward of a micro-batch through the adapter, of which nothing is computed.

    Attributes:
        model: runs the model.
        trainable: the adapter.
        prefix: the layers before its lowest one.
        inputs: the micro-batch.
        hidden: what enters the lowest trained layer, ``[B, L, D]``; None: all layers are computed.
        theta: the parameters.
        objective: of the results.
    """

    model: TrainedModel
    trainable: TrainableAdapter
    prefix: FrozenPrefix
    inputs: Sequence[TrainingInput]
    hidden: mx.array | None
    theta: mx.array
    objective: Objective

    def parts(self) -> list[mx.array]:
        """Return the parts of the parameters."""
        return self.trainable.parts(self.theta[None])

    def gradient(self) -> Gradient:
        """Return the gradient as one graph."""

        def objective(parts: Sequence[mx.array]) -> tuple[mx.array, Mapping[str, mx.array]]:
            return self.objective(self.job(parts).lazy_results)

        with differentiable(self.model.modules[""]):
            (_, arrays), parts = mx.value_and_grad(objective)(self.parts())
        return Gradient(parts, arrays)

    def job(self, parts: Sequence[mx.array], first_layer: int | None = None) -> StagedJob:
        """Return the forward with these parameters; its stages are of layers from ``first_layer``.

        ``first_layer`` None: from the first layer that is computed.
        """
        trainable = self.trainable
        lowest = 0 if self.hidden is None else self.prefix.first_layer
        first = lowest if first_layer is None else first_layer
        with self._entered():
            return self.model.changed_job(
                self.inputs, trainable.stacks_of(parts), first, trainable.heads_of(parts)
            )

    @property
    def first_computed(self) -> int:
        """The index of the first layer that is computed."""
        return 0 if self.hidden is None else self.prefix.first_layer

    def _entered(self) -> AbstractContextManager[Any]:
        return ExitStack() if self.hidden is None else self.prefix.entered(self.hidden)


@contextmanager
def differentiable(module: Any) -> Iterator[None]:
    """Let a module and those in it use only operations that have a gradient.

    Those of mlx_lm and of ``worker.layers`` take no kernels in training mode.
    """
    module.train()
    try:
        yield
    finally:
        module.eval()
