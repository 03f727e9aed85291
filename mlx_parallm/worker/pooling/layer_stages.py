"""Computes a forward layer by layer, with other work in between."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.worker.module_classes import calling, replaced_classes


class LayerStages:
    """Records the layer outputs of an unmodified model.

    MLX is lazy: when the forward returns, only its graph exists. Evaluating the first layer's
    output computes the graph up to there, and so on.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the layers, which are the modules in the model's longest list."""
        lists = [
            value
            for module in model.modules()
            for value in module.values()
            if isinstance(value, list) and value and isinstance(value[0], nn.Module)
        ]
        self._layers: list[Any] = max(lists, key=len, default=[])

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[mx.array]]:
        """Yield a list to which each layer that runs in this context appends its output."""
        outputs: list[mx.array] = []

        def record(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            outputs.append(result[0] if isinstance(result, tuple) else result)
            return result

        # Layers of one class share a subclass, because this runs for every batch.
        recording = functools.cache(lambda original: calling(original, record))
        with replaced_classes((layer, recording(type(layer))) for layer in self._layers):
            yield outputs


class StagedJob:
    """A batch whose forward is computed in stages. Implements ``pooling.EncodeJob``."""

    def __init__(self, outputs: Sequence[mx.array], results: Sequence[mx.array]) -> None:
        """``outputs`` are the layers', in order; ``results`` are the inputs'."""
        # The last layer and the heads are one stage.
        self._outputs = list(outputs[:-1])
        self._results = results

    @property
    def num_stages(self) -> int:
        """See ``pooling.EncodeJob``."""
        return len(self._outputs) + 1

    def advance(self) -> None:
        """See ``pooling.EncodeJob``."""
        mx.eval(self._outputs.pop(0))

    def wait(self) -> list[np.ndarray]:
        """See ``pooling.EncodeJob``."""
        self._outputs.clear()
        mx.eval(self._results)
        return [np.array(result) for result in self._results]
