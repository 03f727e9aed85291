"""Whole KV blocks of a model between its pools and host memory."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import StepError
from mlx_parallm.worker.generation.host_moves import HostMoves
from mlx_parallm.worker.generation.paged_cache import KVPools
from mlx_parallm.worker.ops import Pending


class BlockMoves:
    """Reads and writes blocks: a row of bytes has all that one block holds.

    A row has the block's KV in the layers of the target model, then in those of the draft model,
    whether the draft model has computed it or not.

    Attributes:
        block_bytes: the bytes of a block on this rank; 0 if the model keeps no KV by block.
    """

    def __init__(self, pools: Sequence[KVPools], moves: HostMoves) -> None:
        """``pools``: those of the target model and of the draft model, as far as they have any."""
        self.block_bytes = sum(each.block_bytes for each in pools)
        self._pools = pools
        self._moves = moves

    def read(self, blocks: Sequence[int]) -> Pending[tuple[Buffer, ...]]:
        """Begin to read blocks; the result is a row for each.

        Raises:
            StepError: the model keeps no KV by block.
        """
        if not self.block_bytes:
            raise StepError("the model keeps no KV by block")
        ids = mx.array(list(blocks), mx.int32)
        taken = mx.concatenate([pools.take_blocks(ids) for pools in self._pools], axis=1)
        return self._moves.read(taken)

    def write(self, blocks: Sequence[int], data: Sequence[Buffer]) -> Pending[None]:
        """Begin to write rows that ``read`` returned; no step in flight may read the blocks.

        Raises:
            StepError: a row has another size than the blocks of this model.
        """
        staged = self._moves.stage(data, self.block_bytes, "blocks")
        self._put(mx.array(list(blocks), mx.int32), staged.rows)
        return self._moves.write([each for pools in self._pools for each in pools.arrays()], staged)

    def _put(self, blocks: mx.array, contents: mx.array) -> None:
        """Put rows into blocks of all pools."""
        first = 0
        for pools in self._pools:
            end = first + pools.block_bytes
            pools.put_blocks(blocks, contents[:, first:end])
            first = end
