"""Computes a forward layer by layer, with other work in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.types.pooling import PoolingJob
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls


class LayerStages:
    """Records the layer outputs of an unmodified model.

    MLX is lazy: when the forward returns, only its graph exists. Evaluating the first layer's
    output computes the graph up to there, and so on.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the layers: the modules in the model's longest list, its tower aside."""
        lists = [
            value
            for path, module in model.named_modules()
            if not path.startswith(TOWER)
            for value in module.values()
            if isinstance(value, list) and value and isinstance(value[0], nn.Module)
        ]
        self._layers: list[Any] = max(lists, key=len, default=[])

    @property
    def layers(self) -> Sequence[Any]:
        """The layers, in order."""
        return self._layers

    @contextlib.contextmanager
    def recorded(self, first: int = 0) -> Iterator[list[mx.array]]:
        """Yield a list to which each layer from ``first`` on appends its output in this context."""
        outputs: list[mx.array] = []
        with WrappedCalls(self._layers[first:], partial(_recording, outputs=outputs)):
            yield outputs


class StagedJob(PoolingJob):
    """A batch whose forward is computed in stages. Implements ``pooling.PoolingJob``."""

    def __init__(self, outputs: Sequence[mx.array], results: Sequence[mx.array]) -> None:
        """``outputs`` are the layers', in order; ``results`` are the inputs'."""
        # The last layer and the heads are one stage.
        self._outputs = list(outputs[:-1])
        self._results = results

    @property
    def lazy_results(self) -> Sequence[mx.array]:
        """The results, of which nothing may be computed yet; a gradient can go through them."""
        return self._results

    @property
    @override
    def num_stages(self) -> int:
        return len(self._outputs) + 1

    @override
    def advance(self) -> None:
        mx.eval(self._outputs.pop(0))

    @override
    def wait(self) -> list[np.ndarray]:
        self._outputs.clear()
        mx.eval(self._results)
        return [np.array(result) for result in self._results]


def _recording(original: Any, *, outputs: list[mx.array]) -> Methods:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.__call__(self, *args, **kwargs)
        outputs.append(result[0] if isinstance(result, tuple) else result)
        return result

    return {"__call__": call}
