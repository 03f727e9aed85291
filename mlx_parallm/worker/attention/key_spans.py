"""Which keys a threadgroup of an attention kernel takes: cut where few rows have many.

Pure arithmetic over arrays of rows, or of pieces of chunks.
"""

from __future__ import annotations

import math

import numpy as np

from mlx_parallm.types.shape_buckets import rounded_up

# Attention is not split into fewer keys than this per threadgroup: merging would cost more.
MIN_SPAN = 64
# Numbers of keys that decode's items may have, between a power of two and the next.
SPANS_PER_OCTAVE = 8
# Keys of a tile of the prefill kernel.
TILE = 64
# Parts of the keys of a piece of a prefill chunk, if they are cut.
DIVISIONS = (2, 3, 4, 6, 8, 12, 16)
# They are not if each threadgroup has so many pieces that all end at about the same time.
FULL_TURNS = 4
# Keys that take the prefill kernel as long as merging takes: of each item's part, and having to.
ITEM_KEYS, MERGE_KEYS = 256, 512


def decode_span(starts: np.ndarray, ends: np.ndarray, share: float) -> int:
    """Keys of an item of the decode kernel, for rows of keys ``starts .. ends - 1``.

    It is the share of all keys that keeps every threadgroup equally busy, or a little more: a batch
    of many rows is not cut, one long row among short ones is. Items are at most ``1 / share`` and
    two per row.
    """
    wanted = max(math.ceil((ends - starts).sum() * share), MIN_SPAN)
    # It stays the same for a while as contexts grow, and so do the sums of most items.
    return rounded_up(wanted, MIN_SPAN, 2 * SPANS_PER_OCTAVE)


def prefill_span(starts: np.ndarray, ends: np.ndarray, threadgroups: int) -> int:
    """Keys of an item of the prefill kernel, for pieces of keys ``starts .. ends - 1``.

    So many threadgroups run at once, and others after them, long ones first. Of a few divisions of
    the longest piece it is the one after which the last of them ends first.
    """
    lengths = -np.sort(starts - ends)
    longest, share = int(lengths[0]), float(lengths.sum()) / threadgroups
    # Not cut anywhere.
    best, least = -(-int(ends.max()) // TILE) * TILE, float(longest)
    if len(lengths) >= FULL_TURNS * threadgroups and longest <= share:
        return best
    if len(lengths) > threadgroups:
        # Each takes every so-manyth; or the last turn's begin when those before have ended.
        in_turn = float(lengths[::threadgroups].sum())
        least = min(in_turn, max(float(longest), share + float(lengths[-threadgroups])))
    for parts in DIVISIONS:
        span = -(-longest // (parts * TILE)) * TILE
        turns = float((-(-lengths // span)).sum()) / threadgroups
        end = min(share + span, math.ceil(turns) * span) + turns * ITEM_KEYS + MERGE_KEYS
        if end < least:
            best, least = span, end
        if span == TILE:
            break
    return best


def cut_items(
    rows: np.ndarray, tables: np.ndarray, starts: np.ndarray, ends: np.ndarray, span: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each row's keys ``starts .. ends - 1`` where their position is a multiple of a span.

    Returns:
        Items ``[W, 4]`` as in ``Work``, each row's first item, and each row's number of items.
    """
    counts = (ends - 1) // span - starts // span + 1
    firsts = offsets(counts)
    cut = (starts // span - firsts).repeat(counts) + np.arange(counts.sum())
    items = np.stack(
        [
            rows.repeat(counts),
            tables.repeat(counts),
            np.maximum(starts.repeat(counts), cut * span),
            np.minimum(ends.repeat(counts), (cut + 1) * span),
        ],
        axis=1,
    )
    return items, firsts, counts


def offsets(counts: np.ndarray) -> np.ndarray:
    """How many come before each of these counts."""
    return counts.cumsum() - counts
