"""Leaves rows of logits only the tokens that a grammar allows; stock operations for any backend."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def apply_token_mask(logits: mx.array, words: np.ndarray) -> mx.array:
    """Set to ``-inf`` what a mask leaves out.

    Args:
        logits: any float dtype, ``[rows, vocab]``.
        words: bit ``i % 32`` of word ``i // 32`` is set where token ``i`` may be chosen, uint32
            ``[rows, words]``; tokens beyond the last word may not.
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
