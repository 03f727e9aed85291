"""A paged pool behind the cache verbs that mlx_lm's models speak, one row per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import AttentionBackend, CompilableAttention, LayerPool


class WindowMask(str):
    """The mask that a model asked for; it reaches the seam, or a split module, unread.

    A string, because models hand strings through where they would index an array. ``window`` is
    None for a plain causal mask; ``as_array`` says that the model wanted no "causal".
    """

    window: int | None
    as_array: bool

    def __new__(cls, window: int | None, *, as_array: bool = False) -> WindowMask:
        """A causal mask over the latest ``window`` positions."""
        mask = super().__new__(cls, "causal")
        mask.window = window
        mask.as_array = as_array
        return mask


class UnsupportedAttentionError(RuntimeError):
    """A model uses its cache or mask in a way the packed forward cannot honour."""


class PackedStep:
    """One packed forward: positions, the attention plan, and which arrays are pools.

    ``positions`` is int32 ``[T]``, ``plan`` the backend's. ``tables`` are the rows' block tables,
    int32 ``[T, M]``, while a function is traced that gathers keys.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        plan: Any,
        positions: mx.array,
        tables: mx.array | None = None,
    ) -> None:
        self.positions = positions
        self.backend = backend
        self.plan = plan
        self.tables = tables
        self._pools: dict[int, tuple[LayerPool, int | None]] = {}

    @classmethod
    def of(cls, backend: AttentionBackend, sequences: Sequence[ScheduledSequence]) -> PackedStep:
        """The step that runs these sequences' tokens."""
        return cls(backend, backend.plan(sequences), mx.array(_positions(sequences)))

    @classmethod
    def padded(
        cls, backend: CompilableAttention, sequences: Sequence[ScheduledSequence], num_rows: int
    ) -> PackedStep:
        """The same with ``num_rows`` rows; those behind the sequences' are at position 0."""
        positions = np.zeros(num_rows, dtype=np.int32)
        known = _positions(sequences)
        positions[: len(known)] = known
        return cls(backend, backend.padded_plan(sequences, num_rows), mx.array(positions))

    def register(self, pool: LayerPool, window: int | None) -> None:
        """Make a pool known to ``attend``; its keys are recognised by identity."""
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
        found = self._pools.get(id(keys))
        if found is None:
            return None
        if isinstance(mask, mx.array):
            raise UnsupportedAttentionError("the model made an attention mask of its own")
        pool, window = found
        if isinstance(mask, WindowMask):
            window = mask.window
        return self.backend.attend(
            pool,
            self.plan,
            queries,
            scale=scale,
            window=window,
            sinks=sinks,
            soft_cap=soft_cap,
        )


def _positions(sequences: Sequence[ScheduledSequence]) -> np.ndarray:
    """Of all tokens, int32 ``[T]``."""
    counts = np.array([len(one.token_ids) for one in sequences])
    starts = np.array([one.start for one in sequences])
    firsts = counts.cumsum() - counts
    return ((starts - firsts).repeat(counts) + np.arange(counts.sum())).astype(np.int32)


class PagedLayerCache:
    """One layer's cache during one packed forward.

    ``offset`` is an array of positions ``[T]``, which RoPE takes, and stays the same throughout the
    step: some models read layer 0's in every layer.
    """

    start_position = 0

    def __init__(self, pool: LayerPool, window: int | None, step: PackedStep) -> None:
        self._pool = pool
        self._window = window
        self._step = step

    @property
    def offset(self) -> mx.array:
        """Positions of the rows, int32 ``[T]``."""
        return self._step.positions

    @property
    def keys(self) -> mx.array:
        """The pool. Models that assign it are ignored: the pool is the truth."""
        return self._pool.keys

    @keys.setter
    def keys(self, value: mx.array) -> None:
        del value

    @property
    def values(self) -> mx.array:
        """The pool of values; see ``keys``."""
        return self._pool.values

    @values.setter
    def values(self, value: mx.array) -> None:
        del value

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """Both pools."""
        return self._pool.keys, self._pool.values

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask | None:
        """None, or the window asked for; rows see their own sequence in any case."""
        del return_array
        return None if window_size is None else WindowMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write ``[T, K, 1, D]`` into the pool and return the pool for the seam to recognise."""
        self._step.backend.write(self._pool, self._step.plan, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The pool, without a write: for layers that share another's KV."""
        self._step.register(self._pool, self._window)
        return self._pool.keys, self._pool.values

    def maybe_trim_front(self) -> None:
        """Nothing is trimmed; windows are masks."""

    def is_trimmable(self) -> bool:
        """Not by the model."""
        return False

    def empty(self) -> bool:
        """False: it holds what the block tables say."""
        return False
