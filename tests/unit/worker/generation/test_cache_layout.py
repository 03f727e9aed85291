"""A probe of a model's caches shows which layers have a bias by distance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_parallm.models.seq2seq.dense_cache import DenseSourceCache
from mlx_parallm.worker.generation.cache_layout import has_bias, probe_layout
from tests.source_batches import tiny_t5


class OneLayer(nn.Module):
    """A decoder of one layer, over a cache of a class."""

    def __init__(self, cache: type) -> None:
        super().__init__()
        self._cache = cache
        self.layers = [SimpleNamespace()]

    def make_cache(self) -> list[Any]:
        return [self._cache()]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        rows = mx.zeros((*tokens.shape, 8))[:, None]
        if isinstance(cache[0], DenseSourceCache):
            return cache[0].attend(rows, rows, rows, scale=1.0)
        return cache[0].update_and_fetch(rows, rows)[0]


def test_only_layers_with_a_bias_are_checked_with_one() -> None:
    assert has_bias(probe_layout(tiny_t5().model))
    assert not has_bias(probe_layout(OneLayer(DenseSourceCache)))
    assert not has_bias(probe_layout(OneLayer(KVCache)))
