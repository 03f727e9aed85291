"""Rows of token ids as arrays, in batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Right-padded int32 ids ``[rows, length]`` and which of them are tokens, bool."""

    ids: mx.array
    mask: mx.array


def rows(ids: Sequence[Sequence[int]]) -> Rows:
    """Pad with 0 to the longest, rounded up so that few lengths occur."""
    length = -(-max(map(len, ids)) // MULTIPLE) * MULTIPLE
    padded = np.zeros((len(ids), length), dtype=np.int32)
    mask = np.zeros((len(ids), length), dtype=np.int32)
    for row, one in enumerate(ids):
        padded[row, : len(one)] = one
        mask[row, : len(one)] = 1
    return Rows(mx.array(padded), mx.array(mask).astype(mx.bool_))


def by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Places sorted by length, cut into batches of at most ``max_tokens`` padded tokens."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    found: list[list[int]] = []
    for place in order:
        if found and (len(found[-1]) + 1) * lengths[place] <= max_tokens:
            found[-1].append(place)
        else:
            found.append([place])
    return found
