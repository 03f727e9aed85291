"""Rows of bytes between the device and host memory, for all ranks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TypeVar

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import StepError
from mlx_parallm.worker.device.faults import DeviceFaults
from mlx_parallm.worker.device.host_copies import HostCopies, StagedRows, host_copies
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.ops import OneStage, Pending

R = TypeVar("R")


class HostMoves:
    """Begins to read and to write rows of bytes.

    Where several ranks compute the model, a row has the parts of all ranks, in their order, and
    each rank writes its own. All parts have the same size.
    """

    def __init__(
        self,
        ranks: Ranks | None,
        faults: DeviceFaults,
        recovering: Callable[[], AbstractContextManager[None]],
        *,
        runs_ahead: bool,
        make_copies: Callable[[], HostCopies] = host_copies,
    ) -> None:
        """Prepare.

        Args:
            ranks: the processes that compute the model together; None for one process.
            faults: the failures of the device.
            recovering: a context that drops what a failed move left.
            runs_ahead: True if the device may still run when a move has begun.
            make_copies: makes, for the first move, what copies between the device and the host.
        """
        self._ranks = ranks
        self._faults = faults
        self._recovering = recovering
        self._compute = mx.async_eval if runs_ahead else mx.eval
        self._make_copies = make_copies

    @cached_property
    def _copies(self) -> HostCopies:
        return self._make_copies()

    def reserve(self, row_bytes: int, num_bytes: int) -> None:
        """Have host memory ready for rows that are kept, ``num_bytes`` in all."""
        self._copies.reserve(row_bytes, num_bytes)

    def read(self, rows: mx.array) -> Pending[tuple[Buffer, ...]]:
        """Begin to read rows of this rank, lazy uint8 ``[n, bytes]``."""
        shape = rows.shape
        if self._ranks is not None:
            rows = self._ranks.gather(rows)
        self._compute(rows)
        return self._begun(lambda: self._in_host_memory(rows, shape))

    def stage(self, data: Sequence[Buffer], row_bytes: int, what: str) -> StagedRows:
        """Return the parts of this rank, ``row_bytes`` each, on the device.

        ``what`` says in the error what the rows are.

        Raises:
            StepError: a row has another size.
        """
        num_ranks = 1 if self._ranks is None else self._ranks.size
        if any(len(row) != num_ranks * row_bytes for row in data):
            sizes = sorted({len(row) for row in data})
            raise StepError(
                f"{what} of {sizes} bytes cannot be put into {num_ranks * row_bytes} bytes"
            )
        if self._ranks is not None:
            first = self._ranks.rank * row_bytes
            data = [memoryview(row)[first : first + row_bytes] for row in data]
        return self._copies.stage(data)

    def write(self, written: list[mx.array], staged: StagedRows) -> Pending[None]:
        """Begin to compute arrays from staged rows, whose memory is given back at the end."""
        self._compute(written)

        def end() -> None:
            mx.eval(written)
            self._copies.give_back(staged)

        return self._begun(end)

    def _in_host_memory(self, rows: mx.array, shape: tuple[int, ...]) -> tuple[Buffer, ...]:
        if self._ranks is None:
            return tuple(self._copies.rows(rows))
        # The rows of one rank come after those of another.
        by_rank = np.array(rows, copy=False).reshape(-1, *shape)
        return tuple(row.tobytes() for row in by_rank.swapaxes(0, 1))

    def _begun(self, end: Callable[[], R]) -> Pending[R]:
        return BegunMove(end, self._faults, self._recovering)


class BegunMove(OneStage[R]):
    """A move that the device may still compute."""

    def __init__(
        self,
        end: Callable[[], R],
        faults: DeviceFaults,
        recovering: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``end`` waits for the device and returns the result."""
        self._end = end
        self._faults = faults
        self._num_faults = faults.count
        self._recovering = recovering

    @override
    def wait(self) -> R:
        with self._recovering():
            if self._faults.count != self._num_faults:
                raise StepError("the device failed while blocks or states were moved")
            return self._end()
