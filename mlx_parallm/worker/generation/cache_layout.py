"""What a model keeps between tokens, read off its own caches after one probe token."""

from __future__ import annotations

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

from mlx_parallm.worker.attention.base import LayerShape


@dataclass(frozen=True, slots=True)
class KVLayout:
    """An attention layer's cache: KV that can live in a paged pool.

    ``window`` is the size of a rotating cache, None for one that keeps everything. ``shape`` is
    None for a cache the model never writes.
    """

    shape: LayerShape | None
    window: int | None


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A cache of another kind (recurrent or convolution state); ``num_entries`` arrays."""

    num_entries: int


@dataclass(frozen=True, slots=True)
class ListLayout:
    """Several caches in one layer."""

    parts: tuple[CacheLayout, ...]


@dataclass(frozen=True, slots=True)
class OpaqueLayout:
    """A cache this project does not know; the model must run with its own."""

    name: str


CacheLayout = KVLayout | StateLayout | ListLayout | OpaqueLayout


def probe_layout(model: Any) -> tuple[CacheLayout, ...]:
    """Run one token through the model with its own caches and describe them, one per layer."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    return tuple(_describe(cache) for cache in caches)


def leaves(layouts: tuple[CacheLayout, ...]) -> list[KVLayout | StateLayout | OpaqueLayout]:
    """Every cache, with lists opened."""
    found: list[KVLayout | StateLayout | OpaqueLayout] = []
    for layout in layouts:
        if isinstance(layout, ListLayout):
            found += leaves(layout.parts)
        else:
            found.append(layout)
    return found


def kv_shapes(layouts: tuple[CacheLayout, ...]) -> list[LayerShape]:
    """Shapes of the layers that write KV, in order."""
    shapes = [one.shape for one in leaves(layouts) if isinstance(one, KVLayout)]
    return [shape for shape in shapes if shape is not None]


def _describe(cache: Any) -> CacheLayout:
    if isinstance(cache, CacheList):
        return ListLayout(tuple(_describe(part) for part in cache.caches))
    if isinstance(cache, ArraysCache):
        return StateLayout(len(cache.cache))
    if type(cache) in (KVCache, RotatingKVCache, ChunkedKVCache):
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        return KVLayout(_shape(cache.keys, cache.values), window)
    return OpaqueLayout(type(cache).__name__)


def _shape(keys: mx.array | None, values: mx.array | None) -> LayerShape | None:
    if keys is None or values is None:
        return None
    return LayerShape(
        num_kv_heads=keys.shape[1],
        key_dim=keys.shape[-1],
        value_dim=values.shape[-1],
        dtype=keys.dtype,
    )
