"""The state that a model keeps between tokens, as its own caches show after a probe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_parallm.models.seq2seq.dense_cache import DenseSourceCache
from mlx_parallm.worker.attention.base import LayerShape

# STATE_TOKENS: tokens after which a state has the shape that it keeps; that of an n-gram embedding
# has the latest tokens.
STATE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class KVLayout:
    """An attention layer's cache, whose KV can be in a paged pool.

    Attributes:
        shape: the shape of the layer's KV; None if the model never writes the cache.
        window: the size of a rotating cache, in tokens; None for a cache that keeps all of them.
        has_bias: True if the layer has a bias by distance.
    """

    shape: LayerShape | None
    window: int | None
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An array of a sequence's state.

    Attributes:
        shape: its shape, without the axis of sequences.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def num_bytes(self) -> int:
        """Return its size for one sequence."""
        return math.prod(self.shape) * self.dtype.size

    def __str__(self) -> str:
        """Say it as text, such as ``float32[3, 64]``."""
        return f"{str(self.dtype).removeprefix('mlx.core.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A cache of arrays with recurrent or convolution state; None for those never written."""

    entries: tuple[StateEntry | None, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the cache for one sequence."""
        return sum(entry.num_bytes for entry in self.entries if entry is not None)


@dataclass(frozen=True, slots=True)
class ListLayout:
    """A layer with several caches."""

    parts: tuple[CacheLayout, ...]


@dataclass(frozen=True, slots=True)
class OpaqueLayout:
    """A cache of an unknown class; its model must run with its own caches."""

    name: str


CacheLayout = KVLayout | StateLayout | ListLayout | OpaqueLayout


def probe_layout(model: Any) -> tuple[CacheLayout, ...]:
    """Run tokens with the model's own caches; return their layouts, one per layer."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    layouts = tuple(_describe(cache) for cache in caches)
    if not state_layouts(layouts):
        return layouts
    mx.eval(model(mx.array([[0] * STATE_TOKENS]), cache=caches))
    return tuple(_describe(cache) for cache in caches)


def leaves(layouts: tuple[CacheLayout, ...]) -> list[KVLayout | StateLayout | OpaqueLayout]:
    """Return the layouts of all caches, with lists replaced by their parts."""
    flat: list[KVLayout | StateLayout | OpaqueLayout] = []
    for layout in layouts:
        if isinstance(layout, ListLayout):
            flat += leaves(layout.parts)
        else:
            flat.append(layout)
    return flat


def state_layouts(layouts: tuple[CacheLayout, ...]) -> list[StateLayout]:
    """Return the layouts of the caches with a state, in order."""
    return [layout for layout in leaves(layouts) if isinstance(layout, StateLayout)]


def state_form(layouts: tuple[CacheLayout, ...]) -> str:
    """Return the form of the bytes of a state, see ``StateMoves``; empty if there is none."""
    entries = [entry for layout in state_layouts(layouts) for entry in layout.entries]
    return " ".join("-" if entry is None else str(entry) for entry in entries)


def kv_shapes(layouts: tuple[CacheLayout, ...]) -> list[LayerShape]:
    """Return the shapes of the layers that write KV, in order."""
    shapes = [layout.shape for layout in leaves(layouts) if isinstance(layout, KVLayout)]
    return [shape for shape in shapes if shape is not None]


def has_bias(layouts: tuple[CacheLayout, ...]) -> bool:
    """True if a layer has a bias by distance."""
    return any(isinstance(layout, KVLayout) and layout.has_bias for layout in leaves(layouts))


def _describe(cache: Any) -> CacheLayout:
    if isinstance(cache, CacheList):
        return ListLayout(tuple(_describe(part) for part in cache.caches))
    if isinstance(cache, ArraysCache):
        return StateLayout(tuple(map(_entry, cache.cache)))
    if type(cache) in (KVCache, RotatingKVCache, ChunkedKVCache, DenseSourceCache):
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        has_bias = isinstance(cache, DenseSourceCache) and cache.has_bias
        return KVLayout(_shape(cache.keys, cache.values), window, has_bias)
    return OpaqueLayout(type(cache).__name__)


def _entry(array: mx.array | None) -> StateEntry | None:
    return None if array is None else StateEntry(array.shape[1:], array.dtype)


def _shape(keys: mx.array | None, values: mx.array | None) -> LayerShape | None:
    if keys is None or values is None:
        return None
    return LayerShape(
        num_kv_heads=keys.shape[1],
        key_dim=keys.shape[-1],
        value_dim=values.shape[-1],
        dtype=keys.dtype,
    )
