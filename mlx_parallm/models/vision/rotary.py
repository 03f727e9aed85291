"""Turns of queries and keys by the places of patches (arXiv:2104.09864)."""

from __future__ import annotations

import mlx.core as mx


def turned(x: mx.array, turns: mx.array) -> mx.array:
    """Return ``x`` with each pair of halves turned by its angle.

    Args:
        x: ``[images, patches, heads, size]``.
        turns: angles ``[patches, size / 2]``.
    """
    cos, sin = mx.cos(turns)[:, None], mx.sin(turns)[:, None]
    a, b = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
