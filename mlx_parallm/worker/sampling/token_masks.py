"""Applies grammar masks to logits, with stock operations for any backend."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def apply_token_mask(logits: mx.array, words: np.ndarray) -> mx.array:
    """Return logits with ``-inf`` for tokens that a mask leaves out.

    Args:
        logits: ``[rows, vocab]`` of any float dtype.
        words: uint32 ``[rows, words]``: bit ``i % 32`` of word ``i // 32`` is set if token ``i`` is
            allowed; tokens beyond the last word are not.
    """
    rows, vocab = logits.shape
    num_words = -(-vocab // 32)
    words = words[:, :num_words]
    if words.shape[1] < num_words:
        words = np.pad(words, ((0, 0), (0, num_words - words.shape[1])))
    if vocab % 32:
        padded = mx.pad(logits, [(0, 0), (0, num_words * 32 - vocab)])
        masked = _mask(padded.reshape(rows, num_words, 32), mx.array(words)[:, :, None])
        return masked.reshape(rows, -1)[:, :vocab]
    return _mask(logits.reshape(rows, num_words, 32), mx.array(words)[:, :, None]).reshape(
        rows, vocab
    )


def _mask(logits: mx.array, words: mx.array) -> mx.array:
    bits = (words >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(bits.astype(mx.bool_), logits, mx.array(-mx.inf, logits.dtype))
