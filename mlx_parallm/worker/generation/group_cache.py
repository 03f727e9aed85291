"""What a split module sees instead of the step's packed caches: one group's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.worker.attention.base import AttentionBackend, LayerPool
from mlx_parallm.worker.generation.cache_layout import (
    CacheLayout,
    KVLayout,
    ListLayout,
    StateLayout,
)
from mlx_parallm.worker.generation.kv_pools import KVPools
from mlx_parallm.worker.generation.paged_cache import (
    PackedStep,
    PagedLayerCache,
    UnsupportedAttentionError,
    WindowMask,
)
from mlx_parallm.worker.generation.row_groups import Group, RowGroup
from mlx_parallm.worker.generation.state_store import GroupStateCache, States, StateStore


class PackedStateCache(ArraysCache):
    """Stands for a state cache outside split modules, where no state may be read."""

    def __init__(self, index: int) -> None:
        super().__init__(0)
        self.index = index

    def __getitem__(self, idx: int) -> Any:
        raise UnsupportedAttentionError("state is read outside a split module")

    def __setitem__(self, idx: int, value: Any) -> None:
        raise UnsupportedAttentionError("state is written outside a split module")


class SplitLayerCache(PagedLayerCache):
    """A layer's pool in a packed forward some modules of which are split."""

    def __init__(self, index: int, pool: LayerPool, window: int | None, step: PackedStep) -> None:
        super().__init__(pool, window, step)
        self.index = index
        self.window = window

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask:
        """A mask that each group makes real."""
        window = self._window if window_size is None else window_size
        return WindowMask(window, as_array=return_array)


class CacheParts:
    """Several caches of one layer; indexed as mlx_lm's CacheList is."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = list(caches)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def is_trimmable(self) -> bool:
        """Not by the model."""
        return False


class GroupKVCache:
    """One layer's pool as a dense cache of one group of sequences."""

    start_position = 0

    def __init__(
        self, pool: LayerPool, window: int | None, group: Group, backend: AttentionBackend
    ) -> None:
        self._pool = pool
        self._window = window
        self._group = group
        self._backend = backend

    @property
    def offset(self) -> Any:
        """Position of the first token, the same throughout the step: an int or int32 ``[B]``."""
        return self._group.offset

    @property
    def keys(self) -> mx.array:
        """Keys so far, ``[B, K, S, D]``."""
        return self.keys_and_values()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        del value  # models that assign it are ignored: the pool is the truth

    @property
    def values(self) -> mx.array:
        """Values so far, ``[B, K, S, V]``."""
        return self.keys_and_values()[1]

    @values.setter
    def values(self, value: mx.array) -> None:
        del value

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """Keys and values so far."""
        return self.keys_and_values()

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """As mlx_lm's caches: None, "causal" or a bool array."""
        window = self._window if window_size is None else window_size
        return self._group.mask(window, as_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write ``[B, K, 1, D]`` or ``[1, K, L, D]`` and return all positions."""
        if self._group.length > 1:
            keys, values = keys.swapaxes(0, 2), values.swapaxes(0, 2)
        self._backend.write(self._pool, self._group.plan, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All positions, ``[B, K, S, D]`` and ``[B, K, S, V]``."""
        table = self._group.table
        if table is None:
            raise UnsupportedAttentionError("keys are read in a step that has no block tables")
        keys, values = self._backend.gather(self._pool, table)
        end = self._group.padded_len
        return keys[:, :, :end], values[:, :, :end]

    def maybe_trim_front(self) -> None:
        """Nothing is trimmed; windows are masks."""

    def is_trimmable(self) -> bool:
        """Not by the model."""
        return False

    def empty(self) -> bool:
        """Whether nothing was computed yet."""
        return self._group.is_fresh


class CacheViews:
    """Makes the caches of a step: packed ones, and every group's own."""

    def __init__(
        self,
        layouts: tuple[CacheLayout, ...],
        pools: KVPools,
        backend: AttentionBackend,
    ) -> None:
        self._layouts = layouts
        self._pools = pools
        self._backend = backend
        #: Of all sequences.
        self.states = StateStore([one.num_entries for one in _states(layouts)])
        #: Whether a group has seen keys and values so far.
        self.has_gathered = False

    def packed(self, step: PackedStep) -> list[Any]:
        """One cache per layer for the packed forward."""
        kv, state = count(), count()

        def make(layout: CacheLayout) -> Any:
            if isinstance(layout, ListLayout):
                return CacheParts([make(part) for part in layout.parts])
            if isinstance(layout, StateLayout):
                return PackedStateCache(next(state))
            index = next(kv)
            return SplitLayerCache(index, self._pools.layers[index], _window(layout), step)

        return [make(layout) for layout in self._layouts]

    def begin(self, group: RowGroup) -> States:
        """What a group's sequences bring to a step."""
        if group.is_fresh:
            return self.states.reset(group.slots[0])
        return self.states.fetch(group.slots)

    def grouped(
        self, packed: Any, group: Group, states: States, made: dict[int, GroupStateCache]
    ) -> Any:
        """A group's view of one packed cache; ``made`` remembers those of ``states``."""
        if isinstance(packed, CacheParts):
            parts = [self.grouped(part, group, states, made) for part in packed.caches]
            return CacheParts(parts)
        if isinstance(packed, PackedStateCache):
            if packed.index not in made:
                made[packed.index] = GroupStateCache(states, packed.index)
            return made[packed.index]
        self.has_gathered = True
        window = packed.window
        pool = self._pools.layers[packed.index]
        return GroupKVCache(pool, window, group, self._backend)


def is_packed_cache(value: Any) -> bool:
    """Whether a value is one of ``CacheViews.packed``'s."""
    return isinstance(value, CacheParts | PackedStateCache | SplitLayerCache)


def _states(layouts: tuple[CacheLayout, ...]) -> list[StateLayout]:
    found: list[StateLayout] = []
    for layout in layouts:
        if isinstance(layout, ListLayout):
            found += _states(layout.parts)
        elif isinstance(layout, StateLayout):
            found.append(layout)
    return found


def _window(layout: CacheLayout) -> int | None:
    return layout.window if isinstance(layout, KVLayout) else None
