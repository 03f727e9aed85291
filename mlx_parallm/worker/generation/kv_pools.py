"""The KV pools of all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.worker.attention.base import AttentionBackend, LayerPool, LayerShape
from mlx_parallm.worker.device.allocator import limit_arrays
from mlx_parallm.worker.device.properties import allocate


class KVPools:
    """One pool per cache, in the order of the model's caches; all share one block table."""

    def __init__(
        self, backend: AttentionBackend, shapes: Sequence[LayerShape | None], num_blocks: int
    ) -> None:
        # A cache that the model never writes still has a pool, but a tiny one.
        tiny = LayerShape(num_kv_heads=1, key_dim=1, value_dim=1, dtype=mx.float16)
        self._backend = backend
        self._shapes = [shape or tiny for shape in shapes]
        self._num_blocks = num_blocks
        self._written = [index for index, shape in enumerate(shapes) if shape is not None]
        self.layers: list[LayerPool] = []
        self.restore()

    def restore(self) -> None:
        """Allocate empty pools.

        Raises:
            OutOfMemoryError: there is not enough memory; then no pools remain.
        """
        self.layers[:] = [self._backend.new_pool(shape, self._num_blocks) for shape in self._shapes]
        try:
            allocate(self.arrays())
        except OutOfMemoryError:
            self.release()
            raise
        limit_arrays()

    def release(self) -> None:
        """Free the pools until ``restore``; no step may run in between."""
        self.layers.clear()

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate so that all pools are up to date."""
        return [array for pool in self.layers for array in pool.arrays()]

    def forget_writes(self) -> None:
        """See ``AttentionBackend.forget_writes``."""
        for pool in self.layers:
            self._backend.forget_writes(pool)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks ``(source, target)`` in every layer."""
        if not pairs:
            return
        sources = mx.array([source for source, _ in pairs])
        targets = mx.array([target for _, target in pairs])
        for index in self._written:
            self._backend.copy_blocks(self.layers[index], sources, targets)
