"""The interface of encoder-decoders, and of the caches that their decoder layers call.

A decoder layer calls its cache instead of an attention function, so that a model does not know
where keys and values are: in stock caches (``dense_cache.py``) or in blocks of the KV pool.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import mlx.core as mx

#: ``Arrays``: the arrays of one source by name. Texts have ``TOKEN_IDS`` of ``types.model_input``,
#: int32 ``[S]``.
Arrays = Mapping[str, mx.array]
#: ``SourceKV``: keys and values of sources in one decoder layer, ``[T, K, 1, D]`` each: their rows
#: one source after the other.
SourceKV = tuple[mx.array, mx.array]
#: ``EncoderStages``: yields what to evaluate after each stage but the last, and returns the
#: sources' keys and values in each decoder layer.
EncoderStages = Generator[mx.array, None, list[SourceKV]]


class SourceCache(Protocol):
    """A layer's keys and values, of the tokens before its rows and of their source."""

    #: The position of the first row; an array ``[T]`` of those of packed rows.
    offset: Any

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        distance_bias: mx.array | None = None,
    ) -> mx.array:
        """Return causal self-attention after it has stored the rows' keys and values.

        Args:
            queries: ``[B, H, L, D]``; packed rows are ``[T, H, 1, D]``.
            keys: ``[B, K, L, D]``.
            values: like ``keys``.
            scale: what scores are multiplied by.
            distance_bias: float32 ``[H, N]``; the score of a row at position i with the key at j
                grows by ``[h, min(i - j, N - 1)]``.
        """
        ...

    def attend_source(self, queries: mx.array, *, scale: float) -> mx.array:
        """Return attention ``[B, H, L, D]`` to all positions of the source; zeros without one."""
        ...


@runtime_checkable
class EncoderDecoder(Protocol):
    """A model whose decoder attends to what its encoder makes of a source.

    Attributes:
        max_source_len: the most rows of a source, where the encoder's positions end; None where
            they do not.
        num_encoder_stages: the number of stages of ``encode``: of its yields, and one.
    """

    max_source_len: int | None
    num_encoder_stages: int

    def encode(self, sources: Sequence[Arrays]) -> EncoderStages:
        """Return stages that compute the sources' keys and values in all decoder layers.

        Linear layers get rows ``[1, T, E]`` of all sources, one after the other without padding.
        """
        ...

    def __call__(self, tokens: mx.array, cache: Sequence[SourceCache] | None = None) -> mx.array:
        """Return logits ``[B, L, vocab]`` of decoder tokens ``[B, L]``."""
        ...

    def make_cache(self) -> list[Any]:
        """Return a stock cache for each decoder layer."""
        ...


def is_encoder_decoder(model: object) -> TypeGuard[EncoderDecoder]:
    """Return True if a loaded model has an encoder of sources."""
    return isinstance(model, EncoderDecoder)
