"""The caches of a step for the packed forward, and the dense views of them for each group.

A split module runs once per group, and gets a group's views in place of the packed caches.
"""

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
    state_layouts,
)
from mlx_parallm.worker.generation.paged_cache import (
    KVPools,
    PackedStep,
    PagedLayerCache,
    UnsupportedAttentionError,
    WindowMask,
)
from mlx_parallm.worker.generation.row_groups import Group, RowGroup
from mlx_parallm.worker.generation.state_store import GroupStateCache, States, StateStore


class PackedStateCache(ArraysCache):
    """A placeholder for a state cache, outside split modules, where no state may be used."""

    def __init__(self, index: int) -> None:
        super().__init__(0)
        self.index = index

    def __getitem__(self, idx: int) -> Any:
        raise UnsupportedAttentionError("state is read outside a split module")

    def __setitem__(self, idx: int, value: Any) -> None:
        raise UnsupportedAttentionError("state is written outside a split module")


class SplitLayerCache(PagedLayerCache):
    """A layer's pool in a packed forward with split modules."""

    def __init__(self, index: int, pool: LayerPool, window: int | None, step: PackedStep) -> None:
        super().__init__(pool, window, step)
        self.index = index
        self.window = window

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask:
        """Return a placeholder, in whose place each group puts its own mask."""
        window = self._window if window_size is None else window_size
        return WindowMask(window, as_array=return_array)


class CacheParts:
    """Several caches of one layer, indexed as mlx_lm's ``CacheList``."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = list(caches)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def is_trimmable(self) -> bool:
        """Return False: models may not trim the caches."""
        return False


class GroupKVCache:
    """One layer's pool as a dense cache of one group's sequences."""

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
        """The position of the first token throughout the step: an int or int32 ``[B]``."""
        return self._group.offset

    @property
    def keys(self) -> mx.array:
        """The keys so far, ``[B, K, S, D]``. Assignments are ignored: the pool has the keys."""
        return self.keys_and_values()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        del value

    @property
    def values(self) -> mx.array:
        """The values so far, ``[B, K, S, V]``. Assignments are ignored, as those of ``keys``."""
        return self.keys_and_values()[1]

    @values.setter
    def values(self, value: mx.array) -> None:
        del value

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The keys and values so far."""
        return self.keys_and_values()

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask as mlx_lm's caches do: None, "causal" or a bool array."""
        window = self._window if window_size is None else window_size
        return self._group.mask(window, as_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys ``[B, K, L, D]`` and values; return all positions' KV."""
        if self._group.length > 1:
            keys, values = _by_row(keys), _by_row(values)
        self._backend.write(self._pool, self._group.plan, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the KV of all positions, ``[B, K, S, D]`` and ``[B, K, S, V]``."""
        table = self._group.table
        if table is None:
            raise UnsupportedAttentionError("keys are read in a step that has no block tables")
        keys, values = self._backend.gather(self._pool, table)
        end = self._group.padded_len
        return keys[:, :, :end], values[:, :, :end]

    def maybe_trim_front(self) -> None:
        """Do nothing: windows are masks here, so nothing is trimmed."""

    def is_trimmable(self) -> bool:
        """Return False: models may not trim the caches."""
        return False

    def empty(self) -> bool:
        """True if no token of the sequence was computed yet."""
        return self._group.is_fresh


class CacheViews:
    """Makes the caches of a step: the packed ones, and each group's views of them."""

    def __init__(
        self,
        layouts: tuple[CacheLayout, ...],
        pools: KVPools,
        backend: AttentionBackend,
    ) -> None:
        self._layouts = layouts
        self._pools = pools
        self._backend = backend
        #: The states of all sequences.
        self.states = StateStore(state_layouts(layouts))
        #: True once a group has got a view of keys and values.
        self.has_gathered = False

    def packed(self, step: PackedStep) -> list[Any]:
        """Return one cache per layer for the packed forward."""
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
        """Return the states with which a group's sequences begin a step."""
        if group.is_fresh:
            return self.states.reset(group.slots[0])
        return self.states.fetch(group.slots)

    def grouped(
        self, packed: Any, group: Group, states: States, state_caches: dict[int, GroupStateCache]
    ) -> Any:
        """Return a group's view of one packed cache.

        ``state_caches`` collects the views of ``states``, by the index of their cache.
        """
        if isinstance(packed, CacheParts):
            parts = [self.grouped(part, group, states, state_caches) for part in packed.caches]
            return CacheParts(parts)
        if isinstance(packed, PackedStateCache):
            if packed.index not in state_caches:
                state_caches[packed.index] = GroupStateCache(states, packed.index)
            return state_caches[packed.index]
        self.has_gathered = True
        window = packed.window
        pool = self._pools.layers[packed.index]
        return GroupKVCache(pool, window, group, self._backend)


def _by_row(array: mx.array) -> mx.array:
    """Return keys or values ``[B, K, L, D]`` as those of rows, ``[B * L, K, 1, D]``."""
    return array.swapaxes(1, 2).reshape(-1, array.shape[1], 1, array.shape[3])


def is_packed_cache(value: Any) -> bool:
    """True if a value is a cache made by ``CacheViews.packed``."""
    return isinstance(value, CacheParts | PackedStateCache | SplitLayerCache)


def has_state_cache(value: Any) -> bool:
    """True if a value is, or contains, a cache with states made by ``CacheViews.packed``."""
    if isinstance(value, CacheParts):
        return any(map(has_state_cache, value.caches))
    return isinstance(value, PackedStateCache)


def _window(layout: CacheLayout) -> int | None:
    return layout.window if isinstance(layout, KVLayout) else None
