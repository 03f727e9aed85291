"""Whole KV blocks of a model between its pools and host memory."""

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
from mlx_parallm.worker.device.host_copies import HostCopies, host_copies
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.generation.paged_cache import KVPools
from mlx_parallm.worker.ops import OneStage, Pending

R = TypeVar("R")


class BlockMoves:
    """Reads and writes blocks: a row of bytes has all that one block holds.

    A row has the block's KV in the layers of the target model, then in those of the draft model,
    whether the draft model has computed it or not. Where several ranks compute the model, it has
    the parts of all ranks, in their order, and each rank writes its own.
    """

    def __init__(
        self,
        pools: Sequence[KVPools],
        ranks: Ranks | None,
        faults: DeviceFaults,
        recovering: Callable[[], AbstractContextManager[None]],
        *,
        runs_ahead: bool,
        make_copies: Callable[[], HostCopies] = host_copies,
    ) -> None:
        """Prepare.

        Args:
            pools: those of the target model and of the draft model, as far as they have any.
            ranks: the processes that compute the model together; None for one process.
            faults: the failures of the device.
            recovering: a context that drops what a failed move left.
            runs_ahead: True if the device may still run when a move has begun.
            make_copies: makes, for the first move, what copies between the device and the host.
        """
        self._pools = pools
        self._ranks = ranks
        self._faults = faults
        self._recovering = recovering
        self._compute = mx.async_eval if runs_ahead else mx.eval
        self._make_copies = make_copies

    @cached_property
    def _copies(self) -> HostCopies:
        return self._make_copies()

    @property
    def _rank_bytes(self) -> int:
        """The bytes of a block on this rank."""
        return sum(pools.block_bytes for pools in self._pools)

    def reserve(self, num_bytes: int) -> None:
        """Have host memory ready for ``num_bytes`` of rows that are kept."""
        self._copies.reserve(self._rank_bytes, num_bytes)

    def read(self, blocks: Sequence[int]) -> Pending[tuple[Buffer, ...]]:
        """Begin to read blocks; the result is a row for each.

        Raises:
            StepError: the model keeps no KV by block.
        """
        if not self._rank_bytes:
            raise StepError("the model keeps no KV by block")
        ids = mx.array(list(blocks), mx.int32)
        taken = mx.concatenate([pools.take_blocks(ids) for pools in self._pools], axis=1)
        if self._ranks is not None:
            taken = self._ranks.gather(taken)
        self._compute(taken)
        return self._begun(lambda: self._rows(taken, len(blocks)))

    def write(self, blocks: Sequence[int], data: Sequence[Buffer]) -> Pending[None]:
        """Begin to write rows that ``read`` returned; no step in flight may read the blocks.

        Raises:
            StepError: a row has another size than the blocks of this model.
        """
        num_ranks = 1 if self._ranks is None else self._ranks.size
        width = self._rank_bytes
        if any(len(row) != num_ranks * width for row in data):
            sizes = sorted({len(row) for row in data})
            raise StepError(f"blocks of {sizes} bytes cannot be put into {num_ranks * width} bytes")
        if self._ranks is not None:
            first = self._ranks.rank * width
            data = [memoryview(row)[first : first + width] for row in data]
        staged = self._copies.stage(data)
        self._put(mx.array(list(blocks), mx.int32), staged.rows)
        written = [array for pools in self._pools for array in pools.arrays()]
        self._compute(written)

        def end() -> None:
            mx.eval(written)
            self._copies.give_back(staged)

        return self._begun(end)

    def _put(self, blocks: mx.array, contents: mx.array) -> None:
        """Put rows into blocks of all pools."""
        first = 0
        for pools in self._pools:
            end = first + pools.block_bytes
            pools.put_blocks(blocks, contents[:, first:end])
            first = end

    def _rows(self, taken: mx.array, num_blocks: int) -> tuple[Buffer, ...]:
        if self._ranks is None:
            return tuple(self._copies.rows(taken))
        # The rows of one rank come after those of another.
        rows = np.array(taken, copy=False).reshape(-1, num_blocks, self._rank_bytes)
        return tuple(row.tobytes() for row in rows.swapaxes(0, 1))

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
                raise StepError("the device failed while blocks were moved")
            return self._end()
