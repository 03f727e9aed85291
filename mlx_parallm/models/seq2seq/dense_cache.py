"""Stock caches of an encoder-decoder: what its results in the packed path are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_parallm.models.seq2seq.interface import Arrays, EncoderDecoder, SourceKV


class DenseSourceCache(KVCache):
    """The keys and values of one decoder layer, which rows of all batch entries have.

    Attributes:
        source: keys and values ``[1, K, S, D]`` of the source; None without one.
        has_bias: True once the layer has attended with a bias by distance.
        is_wide: True if scores with a bias are float32, False if they have the dtype of queries.
            Scores that are not scaled are large, so that 16 bits round them by much.
    """

    is_wide = True

    def __init__(self) -> None:
        super().__init__()
        self.source: tuple[mx.array, mx.array] | None = None
        self.has_bias = False

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        distance_bias: mx.array | None = None,
    ) -> mx.array:
        """See ``SourceCache``."""
        first = self.offset
        self.has_bias = distance_bias is not None
        seen: Any = self.update_and_fetch(keys, values)
        if distance_bias is None:
            return mx.fast.scaled_dot_product_attention(queries, *seen, scale=scale, mask="causal")
        dtype = mx.float32 if self.is_wide else queries.dtype
        arrays = (array.astype(dtype) for array in (queries, *seen))
        mask = _mask(distance_bias, first, queries.shape[2]).astype(dtype)
        output = mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask)
        return output.astype(queries.dtype)

    def attend_source(self, queries: mx.array, *, scale: float) -> mx.array:
        """See ``SourceCache``."""
        if self.source is None:
            return mx.zeros_like(queries)
        keys, values = self.source
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)


def _mask(bias: mx.array, first: int, rows: int) -> mx.array:
    """Return what is added to scores ``[H, L, first + L]``: the bias, -inf for later keys."""
    distances = mx.arange(first, first + rows)[:, None] - mx.arange(first + rows)
    biases = bias[:, mx.clip(distances, 0, bias.shape[1] - 1)]
    return mx.where(distances < 0, -mx.inf, biases)


def encoded(model: EncoderDecoder, sources: Sequence[Arrays]) -> list[SourceKV]:
    """Return the sources' evaluated keys and values in each decoder layer."""
    stages = model.encode(sources)
    while True:
        try:
            mx.eval(next(stages))
        except StopIteration as end:
            made: list[SourceKV] = end.value
            mx.eval(made)
            return made


def set_source(model: EncoderDecoder, caches: Sequence[DenseSourceCache], arrays: Arrays) -> None:
    """Encode a source and give it to the stock caches of a model's decoder layers."""
    for cache, kv in zip(caches, encoded(model, [arrays]), strict=True):
        keys, values = (rows.transpose(2, 1, 0, 3) for rows in kv)
        cache.source = keys, values
