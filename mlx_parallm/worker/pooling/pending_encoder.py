"""An encoder whose weights come into memory in parts, so that streams need not wait for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.numerics.finite import evaluate_weights, scale_modes
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder
from mlx_parallm.worker.weights.loader import parameters_of

PART_BYTES = 4 << 20
# What is done between two steps takes about as long, or as one part.
ADVANCE_S = 0.01


class PendingEncoder:
    """A model that was opened and not evaluated. Lives on the engine thread."""

    def __init__(
        self,
        model: Any,
        folder: Path,
        finish: Callable[[], AdaptedEncoder],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``finish`` makes a runner of the model, whose parameters are evaluated by then."""
        self._clock = clock
        self._folder = folder
        self._finish = finish
        arrays = parameters_of(model)
        self.num_bytes = sum(array.nbytes for array in arrays.values())
        self._modes = scale_modes(model)
        self._parts = list(_parts(arrays))
        self._num_parts = len(self._parts)

    def advance(self) -> float:
        """Have the next parts in memory; which share is there, from 0 to 1.

        Raises:
            ModelLoadError: a file cannot be read, or a weight is NaN or infinite.
        """
        end_s = self._clock() + ADVANCE_S
        while self._parts:
            with load_failures(self._folder):
                evaluate_weights(self._parts.pop(0), self._folder, self._modes)
            if self._clock() >= end_s:
                break
        return 1.0 - len(self._parts) / max(1, self._num_parts)

    def finish(self) -> AdaptedEncoder:
        """The runner; all parts are there."""
        while self._parts:
            self.advance()
        return self._finish()


def _parts(arrays: Mapping[str, mx.array]) -> Iterator[dict[str, mx.array]]:
    """Arrays by name, in parts of ``PART_BYTES``, or of one that is larger."""
    part: dict[str, mx.array] = {}
    size = 0
    for name, array in arrays.items():
        if part and size + array.nbytes > PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = array
        size += array.nbytes
    if part:
        yield part
