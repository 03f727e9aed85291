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
    """Return ids padded with 0 to the longest, rounded up so that few lengths occur."""
    length = -(-max(map(len, ids)) // MULTIPLE) * MULTIPLE
    padded = np.zeros((len(ids), length), dtype=np.int32)
    mask = np.zeros((len(ids), length), dtype=np.int32)
    for row, text_ids in enumerate(ids):
        padded[row, : len(text_ids)] = text_ids
        mask[row, : len(text_ids)] = 1
    return Rows(mx.array(padded), mx.array(mask).astype(mx.bool_))


def by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return indices sorted by length, in batches of at most ``max_tokens`` padded tokens."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    groups: list[list[int]] = []
    for place in order:
        if groups and (len(groups[-1]) + 1) * lengths[place] <= max_tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups
