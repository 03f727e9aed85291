"""The log of a session: for each step its seed, uint64, and its coefficients, float32."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mlx_parallm.types.training import Step


class StepLog:
    """Reads and writes the records of one session."""

    def __init__(self, num_directions: int, keep: Callable[[int], float]) -> None:
        """Prepare.

        Args:
            num_directions: coefficients of a record.
            keep: returns the factor of weight decay of a step, by its number from 0.
        """
        self._format = struct.Struct(f"<Q{num_directions}f")
        self._keep = keep

    @property
    def record_bytes(self) -> int:
        """The size of a record."""
        return self._format.size

    def record(self, step: Step) -> bytes:
        """Return the bytes of a step."""
        return self._format.pack(step.seed, *step.coefficients)

    def rounded(self, step: Step) -> Step:
        """Return the step as the log has it: with coefficients of float32."""
        _, *coefficients = self._format.unpack(self.record(step))
        return replace(step, coefficients=coefficients)

    def steps(self, content: bytes) -> Sequence[Step]:
        """Return the steps of a log; a record that was cut off at the end is ignored."""
        return list(self._steps(content[: self.whole_bytes(content)]))

    def whole_bytes(self, content: bytes) -> int:
        """Return how many bytes of a log are whole records."""
        return len(content) - len(content) % self._format.size

    def _steps(self, content: bytes) -> Iterator[Step]:
        for number, (seed, *coefficients) in enumerate(self._format.iter_unpack(content)):
            yield Step(seed, coefficients, self._keep(number))
