"""The KV pools of a model, and one with the interface of mlx_lm's caches.

The latter is for forwards with one row per token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import (
    AttentionBackend,
    CompilableAttention,
    HeadMaker,
    LayerPool,
    LayerShape,
)
from mlx_parallm.worker.attention.dense import TwoWayRows
from mlx_parallm.worker.attention.heads import HeadInputs, HeadSettings
from mlx_parallm.worker.device.allocator import limit_arrays
from mlx_parallm.worker.device.properties import allocate
from mlx_parallm.worker.layers.block_kernels import Residual
from mlx_parallm.worker.layers.kept_states import StateNotes


class KVPools:
    """One pool per cache, in the order of the model's caches; all share one block table."""

    def __init__(
        self,
        backend: AttentionBackend,
        shapes: Sequence[LayerShape | None],
        num_blocks: int,
        *,
        fills: bool = True,
    ) -> None:
        """Allocate pools for caches of these shapes; with ``fills`` False, ``fill`` does it.

        A shape is None if the model never writes that cache.
        """
        # A cache that the model never writes still has a pool, but a tiny one.
        tiny = LayerShape(num_kv_heads=1, key_dim=1, value_dim=1, dtype=mx.float16)
        self._backend = backend
        self._shapes = [shape or tiny for shape in shapes]
        self._num_blocks = num_blocks
        self._written = [index for index, shape in enumerate(shapes) if shape is not None]
        self.layers: list[LayerPool] = []
        if fills:
            self.restore()

    def restore(self, num_blocks: int | None = None) -> None:
        """Allocate empty pools, perhaps of another number of blocks; raise as ``fill`` does."""
        if num_blocks is not None:
            self._num_blocks = num_blocks
        for _ in self.fill():
            pass

    def fill(self) -> Generator[None]:
        """Allocate empty pools in stages; see ``ops.Stages``.

        Raises:
            OutOfMemoryError: there is not enough memory; then no pools remain.
        """
        self.layers[:] = [self._backend.new_pool(shape, self._num_blocks) for shape in self._shapes]
        try:
            yield from allocate(self.arrays())
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

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block in all layers."""
        return sum(self._layer_bytes(index) for index in self._written)

    def take_blocks(self, blocks: mx.array) -> mx.array:
        """Return what blocks, int32 ``[n]``, hold in all layers, lazy uint8 ``[n, block_bytes]``.

        See ``AttentionBackend.take_blocks``.
        """
        taken = [self._backend.take_blocks(self.layers[index], blocks) for index in self._written]
        return mx.concatenate(taken, axis=1)

    def put_blocks(self, blocks: mx.array, contents: mx.array) -> None:
        """Make blocks, int32 ``[n]``, hold what ``take_blocks`` returned."""
        first = 0
        for index in self._written:
            end = first + self._layer_bytes(index)
            self._backend.put_blocks(self.layers[index], blocks, contents[:, first:end])
            first = end

    def _layer_bytes(self, index: int) -> int:
        """Return the bytes of a block in one layer."""
        return self._backend.bytes_per_token(self._shapes[index]) * self._backend.block_size


class WindowMask(str):
    """A placeholder for a causal mask, which models pass on to attention or to a split module.

    It is a string, because models pass strings on as they are, but would index an array.

    Attributes:
        window: a row attends to its latest ``window`` positions; None: to all.
        as_array: True if the model asked for an array, not for "causal".
    """

    window: int | None
    as_array: bool

    def __new__(cls, window: int | None, *, as_array: bool = False) -> WindowMask:
        """Return a placeholder for a causal mask over the latest ``window`` positions."""
        mask = super().__new__(cls, "causal")
        mask.window = window
        mask.as_array = as_array
        return mask


class UnsupportedAttentionError(RuntimeError):
    """A model uses its cache or mask in a way that the packed forward does not support."""


class PackedStep:
    """One packed forward: its positions, the attention plan, and which arrays are pools.

    Attributes:
        positions: the position ids of the rows, int32 ``[T]``.
        backend: the attention backend.
        plan: the backend's plan of the step.
        tables: the block tables of the rows, int32 ``[T, M]``; None unless a function that gathers
            keys is being traced.
        source_plan: the backend's plan of the rows' cross-attention; None without sources.
        notes: see ``seam.PagedStep``.
        residual: the last sum of the latest block that has kernels; None before the first.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        plan: Any,
        positions: mx.array,
        tables: mx.array | None = None,
        two_way: TwoWayRows | None = None,
        source_plan: Any = None,
    ) -> None:
        self.positions = positions
        self.backend = backend
        self.plan = plan
        self.tables = tables
        self.source_plan = source_plan
        self.notes: StateNotes | None = None
        self.residual: Residual | None = None
        self._two_way = two_way or TwoWayRows()
        self._pools: dict[int, tuple[LayerPool, int | None]] = {}

    @classmethod
    def of(
        cls,
        backend: AttentionBackend,
        sequences: Sequence[ScheduledSequence],
        two_way: TwoWayRows | None = None,
        source_plan: Any = None,
    ) -> PackedStep:
        """Return the forward of these sequences' tokens."""
        positions = mx.array(positions_of(sequences))
        plan = backend.plan(sequences)
        return cls(backend, plan, positions, two_way=two_way, source_plan=source_plan)

    @classmethod
    def padded(
        cls,
        backend: CompilableAttention,
        sequences: Sequence[ScheduledSequence],
        num_rows: int,
        two_way: TwoWayRows | None = None,
        source_plan: Any = None,
    ) -> PackedStep:
        """Return the forward of these sequences' tokens, padded to ``num_rows`` rows.

        Padding rows follow those of the sequences, and have position 0.
        """
        positions = np.zeros(num_rows, dtype=np.int32)
        real = positions_of(sequences)
        positions[: len(real)] = real
        plan = backend.padded_plan(sequences, num_rows)
        return cls(backend, plan, mx.array(positions), two_way=two_way, source_plan=source_plan)

    def register(self, pool: LayerPool, window: int | None) -> None:
        """Add a pool for ``attend``, which recognises it by the identity of its keys."""
        self._pools[id(pool.keys)] = (pool, window)

    def attend(
        self,
        queries: mx.array,
        keys: Any,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        soft_cap: float | None = None,
    ) -> mx.array | None:
        """See ``seam.PagedStep``.

        Raises:
            UnsupportedAttentionError: the model made a mask of its own.
        """
        registered = self._pools.get(id(keys))
        if registered is None:
            return None
        if isinstance(mask, mx.array):
            raise UnsupportedAttentionError("the model made an attention mask of its own")
        pool, window = registered
        if isinstance(mask, WindowMask):
            window = mask.window
        options = {"scale": scale, "window": window, "sinks": sinks, "soft_cap": soft_cap}
        output = self.backend.attend(pool, self.plan, queries, **options)
        return self._two_way.apply(output, self.backend, pool, queries, **options)


def positions_of(sequences: Sequence[ScheduledSequence]) -> np.ndarray:
    """Return the position ids of all tokens, int32 ``[T]``."""
    counts = np.array([len(sequence.token_ids) for sequence in sequences])
    starts = np.array([sequence.start for sequence in sequences])
    firsts = counts.cumsum() - counts
    places = (starts - firsts).repeat(counts) + np.arange(counts.sum())
    for sequence, first in zip(sequences, firsts, strict=True):
        if sequence.rope_offsets:
            places[first : first + len(sequence.token_ids)] += offsets_of(sequence)
    return places.astype(np.int32)


def offsets_of(sequence: ScheduledSequence) -> np.ndarray:
    """Return what is added to the places of a sequence's tokens, int ``[len(token_ids)]``."""
    indices, offsets = zip(*sequence.rope_offsets, strict=True)
    ends = (*indices[1:], len(sequence.token_ids))
    return np.repeat(offsets, np.subtract(ends, indices))


class PagedLayerCache:
    """One layer's cache during one packed forward.

    ``offset`` is an array of positions ``[T]``, which RoPE takes too. It does not change during the
    step, because some models read that of layer 0 in every layer.
    """

    start_position = 0

    def __init__(self, pool: LayerPool, window: int | None, step: PackedStep) -> None:
        self._pool = pool
        self._window = window
        self._step = step

    @property
    def offset(self) -> mx.array:
        """The positions of the rows, int32 ``[T]``."""
        return self._step.positions

    @property
    def keys(self) -> mx.array:
        """The pool of keys. Assignments by models are ignored: ``update_and_fetch`` writes it."""
        return self._pool.keys

    @keys.setter
    def keys(self, value: mx.array) -> None:
        del value

    @property
    def values(self) -> mx.array:
        """The pool of values. Assignments are ignored, as those of ``keys``."""
        return self._pool.values

    @values.setter
    def values(self, value: mx.array) -> None:
        del value

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The pools of keys and values."""
        return self._pool.keys, self._pool.values

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask | None:
        """Return None, or a placeholder for a window: rows see only their own sequence anyway."""
        del return_array
        return None if window_size is None else WindowMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys ``[T, K, 1, D]`` and values; return the pools, which the seam recognises."""
        self._step.backend.write(self._pool, self._step.plan, keys, values)
        return self.keys_and_values()

    def makes_heads(self, dtype: mx.Dtype) -> bool:
        """True if ``make_heads`` applies to products of this dtype."""
        backend = self._step.backend
        return isinstance(backend, HeadMaker) and backend.makes_heads(self._pool, dtype)

    def make_heads(self, settings: HeadSettings, inputs: HeadInputs) -> mx.array:
        """Write the keys and values of a layer's products; return its queries ``[T, H, 1, D]``."""
        backend = self._step.backend
        assert isinstance(backend, HeadMaker), "see makes_heads"
        self._step.register(self._pool, self._window)
        return backend.make_heads(self._pool, self._step.plan, settings, inputs)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the pools without a write, for layers that share another layer's KV."""
        self._step.register(self._pool, self._window)
        return self._pool.keys, self._pool.values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        distance_bias: mx.array | None = None,
    ) -> mx.array:
        """See ``models.seq2seq.interface.SourceCache``."""
        step = self._step
        step.backend.write(self._pool, step.plan, keys, values)
        return step.backend.attend(
            self._pool,
            step.plan,
            queries,
            scale=scale,
            window=self._window,
            sinks=None,
            distance_bias=distance_bias,
        )

    def attend_source(self, queries: mx.array, *, scale: float) -> mx.array:
        """See ``models.seq2seq.interface.SourceCache``."""
        step = self._step
        if step.source_plan is None:
            return mx.zeros_like(queries)
        return step.backend.attend(
            self._pool, step.source_plan, queries, scale=scale, window=None, sinks=None
        )

    def maybe_trim_front(self) -> None:
        """Do nothing: windows are masks here, so nothing is trimmed."""

    def is_trimmable(self) -> bool:
        """Return False: models may not trim the pool."""
        return False

    def empty(self) -> bool:
        """Return False: the pool has whatever the block tables say."""
        return False
