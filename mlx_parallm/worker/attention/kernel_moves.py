"""Kernels that move keys and values: into a pool, out of it, and within it."""

from __future__ import annotations

import functools
import math

import mlx.core as mx

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel
from mlx_parallm.worker.attention.kernel_pool import VECTOR, KernelPool, PoolLayout

# THREADS of a threadgroup.
THREADS = 128
COPY_BYTES = 16
# Last inputs of all kernels that copy whole blocks: see ``MoveKernels._move``.
_ORDERED = ("previous", "key_pool", "value_pool")
_COPY = KernelSpec("copy.metal", ("sources", "targets", *_ORDERED), ("token",))
_TAKE = KernelSpec("copy.metal", ("sources", *_ORDERED), ("token", "contents"))
_PUT = KernelSpec("copy.metal", ("targets", "contents", *_ORDERED), ("token",))


class MoveKernels:
    """The move kernels for pools of one layout."""

    def __init__(self, layout: PoolLayout, builder: KernelBuilder) -> None:
        self._layout = layout
        self._builder = builder

    def begin(self) -> None:
        """Start to compile the kernels that every model needs, in the background if possible."""
        # Making a kernel starts its compilation.
        _ = self._write, self._gather

    def write(self, pool: KernelPool, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write keys ``[T, K, 1, D]`` and values ``[T, K, 1, V]`` at flat positions, int32 ``[T]``.

        Rows with a negative slot are not written.
        """
        shape = self._layout.shape
        inputs = [keys.astype(shape.dtype), values.astype(shape.dtype), slots, pool.token]
        (pool.token,) = self._write(
            inputs=[*inputs, *pool.bound],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=_grid(slots.size * shape.num_kv_heads * self._write_vectors),
            threadgroup=(THREADS, 1, 1),
        )

    def gather(self, pool: KernelPool, table: mx.array) -> tuple[mx.array, mx.array]:
        """See ``AttentionBackend.gather``."""
        layout, shape = self._layout, self._layout.shape
        outer = (table.shape[0], shape.num_kv_heads, table.shape[1] * layout.block_size)
        vectors = (shape.key_dim + shape.value_dim) // VECTOR
        keys, values = self._gather(
            inputs=[table.astype(mx.int32), pool.token, *pool.bound],
            output_shapes=[(*outer, shape.key_dim), (*outer, shape.value_dim)],
            output_dtypes=[shape.dtype, shape.dtype],
            grid=_grid(math.prod(outer) * vectors),
            threadgroup=(THREADS, 1, 1),
        )
        return keys, values

    def copy(self, pool: KernelPool, sources: mx.array, targets: mx.array) -> None:
        """Copy blocks ``sources`` to ``targets``, int32 ``[n]``; no target may be a source."""
        blocks = [sources.astype(mx.int32), targets.astype(mx.int32)]
        for arrays in _pairs(pool):
            self._move(_COPY, pool, arrays, blocks)

    def take(self, pool: KernelPool, blocks: mx.array) -> mx.array:
        """See ``AttentionBackend.take_blocks``."""
        sources = [blocks.astype(mx.int32)]
        taken = [self._move(_TAKE, pool, arrays, sources)[0] for arrays in _pairs(pool)]
        return mx.concatenate(taken, axis=1).view(mx.uint8)

    def put(self, pool: KernelPool, blocks: mx.array, contents: mx.array) -> None:
        """See ``AttentionBackend.put_blocks``."""
        targets, words, first = blocks.astype(mx.int32), contents.view(mx.uint32), 0
        for arrays in _pairs(pool):
            end = first + sum(map(_block_bytes, arrays)) // mx.uint32.size
            self._move(_PUT, pool, arrays, [targets, words[:, first:end]])
            first = end

    def _move(
        self,
        spec: KernelSpec,
        pool: KernelPool,
        arrays: tuple[mx.array, mx.array],
        inputs: list[mx.array],
    ) -> list[mx.array]:
        """Launch a kernel that copies whole blocks; return its outputs besides the token.

        Args:
            spec: the kernel.
            pool: the pool, whose token is replaced.
            arrays: those of the pool that have its keys and values, or the scales of these.
            inputs: the kernel's own inputs; the first has the blocks, int32 ``[n]``.
        """
        key_bytes, value_bytes = map(_block_bytes, arrays)
        constants: dict[str, Constant] = {
            "KEY_BYTES": key_bytes,
            "VALUE_BYTES": value_bytes,
            "THREADS": THREADS,
            "FROM_POOL": int("sources" in spec.inputs),
            "TO_POOL": int("targets" in spec.inputs),
        }
        num_blocks, num_bytes = inputs[0].size, key_bytes + value_bytes
        shapes = ((1,), (num_blocks, num_bytes // mx.uint32.size))
        pool.token, *others = self._builder.kernel(spec, constants)(
            inputs=[*inputs, pool.token, *arrays],
            output_shapes=shapes[: len(spec.outputs)],
            output_dtypes=[mx.int32, mx.uint32][: len(spec.outputs)],
            grid=_grid(num_blocks * num_bytes // COPY_BYTES),
            threadgroup=(THREADS, 1, 1),
        )
        return others

    @functools.cached_property
    def _write(self) -> Kernel:
        text = "quantise.metal" if self._layout.quantisation else "write.metal"
        inputs = ("keys", "values", "slots", "previous", *self._layout.pools)
        return self._builder.kernel(KernelSpec(text, inputs, ("token",)), self._constants)

    @functools.cached_property
    def _gather(self) -> Kernel:
        inputs = ("table", "previous", *self._layout.pools)
        spec = KernelSpec("gather.metal", inputs, ("keys", "values"))
        return self._builder.kernel(spec, self._constants)

    @property
    def _constants(self) -> dict[str, Constant]:
        layout = self._layout
        own: dict[str, Constant] = {"T": layout.shape.dtype, "VEC": VECTOR, "THREADS": THREADS}
        return {**own, **layout.constants()}

    @functools.cached_property
    def _write_vectors(self) -> int:
        """Return the threads for a token's key and value in one head: whole groups if quantised."""
        scheme = self._layout.quantisation
        dims = (self._layout.shape.key_dim, self._layout.shape.value_dim)
        if scheme is None:
            return sum(dim // VECTOR for dim in dims)
        return sum(scheme.groups(dim) * scheme.group_size // VECTOR for dim in dims)


def _pairs(pool: KernelPool) -> list[tuple[mx.array, mx.array]]:
    """Return the arrays that kernels are given for keys and values, and those for their scales."""
    return list(zip(pool.bound[::2], pool.bound[1::2], strict=True))


def _block_bytes(array: mx.array) -> int:
    """Return the bytes of a block in an array of a pool."""
    return array.nbytes // array.shape[0]


def _grid(threads: int) -> tuple[int, int, int]:
    """Return whole threadgroups for so many threads; kernels ignore the surplus."""
    return (-(-threads // THREADS) * THREADS, 1, 1)
