"""An encoder whose weights come into memory in parts, so that streams need not wait for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.runner.encoder_adapters import AdaptedEncoder
from mlx_parallm.runner.loader import parameters_of

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
        arrays = list(parameters_of(model).values())
        self.num_bytes = sum(array.nbytes for array in arrays)
        self._parts = list(_parts(arrays))
        self._num_parts = len(self._parts)

    def advance(self) -> float:
        """Have the next parts in memory; which share is there, from 0 to 1.

        Raises:
            ModelLoadError: a file cannot be read.
        """
        end_s = self._clock() + ADVANCE_S
        while self._parts:
            try:
                mx.eval(self._parts.pop(0))
            except RuntimeError as cause:
                raise ModelLoadError(f"{self._folder} could not be loaded: {cause}") from cause
            if self._clock() >= end_s:
                break
        return 1.0 - len(self._parts) / max(1, self._num_parts)

    def finish(self) -> AdaptedEncoder:
        """The runner; all parts are there."""
        while self._parts:
            self.advance()
        return self._finish()


def _parts(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    """Arrays in parts of ``PART_BYTES``, or of one that is larger."""
    part: list[mx.array] = []
    size = 0
    for array in arrays:
        if part and size + array.nbytes > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(array)
        size += array.nbytes
    if part:
        yield part
