"""Divides keys among the threadgroups of attention kernels: long rows are cut if rows are few.

It is pure arithmetic over arrays of rows, or of pieces of chunks.
"""

from __future__ import annotations

import math

import numpy as np

from mlx_parallm.types.shape_buckets import rounded_up

# MIN_SPAN: fewest keys per threadgroup; below, merging would cost more. Spans are multiples of it.
MIN_SPAN = 64
# SPANS_PER_OCTAVE: sizes of decode's items between a power of two and the next.
SPANS_PER_OCTAVE = 8
# TILE: keys that the prefill kernel takes at once.
TILE = 64
# DIVISIONS: parts into which the keys of a prefill piece may be cut.
DIVISIONS = (2, 3, 4, 6, 8, 12, 16)
# FULL_TURNS: with so many pieces per threadgroup that all end at about the same time, none is cut.
FULL_TURNS = 4
# Merging costs the prefill kernel as much time as this many keys: per item, and once at all.
ITEM_KEYS, MERGE_KEYS = 256, 512


def decode_span(starts: np.ndarray, ends: np.ndarray, share: float, least: int = MIN_SPAN) -> int:
    """Return the keys of an item of the decode kernel, for rows of keys ``starts .. ends - 1``.

    The longest row is cut into equal parts, of about the share of all keys that keeps every
    threadgroup equally busy, or of ``least`` keys if that is more: a batch of many rows is not cut,
    one long row among short ones is. There are at most ``1 / share`` items, and two more per row.
    """
    lengths = ends - starts
    wanted = max(math.ceil(lengths.sum() * share), least)
    longest = int(lengths.max(initial=1))
    part = math.ceil(longest / max(1, round(longest / wanted)))
    # Rounding keeps the size while contexts grow, and with it the sums of most items.
    return rounded_up(part, MIN_SPAN, 2 * SPANS_PER_OCTAVE)


def prefill_span(starts: np.ndarray, ends: np.ndarray, threadgroups: int) -> int:
    """Return the keys of an item of the prefill kernel, for pieces of keys ``starts .. ends - 1``.

    ``threadgroups`` run at once, and others after them, long ones first. It is that of a few
    divisions of the longest piece with which the last threadgroup ends earliest.
    """
    lengths = -np.sort(starts - ends)
    longest, share = int(lengths[0]), float(lengths.sum()) / threadgroups
    # The first candidate cuts no piece.
    best, least = -(-int(ends.max()) // TILE) * TILE, float(longest)
    if len(lengths) >= FULL_TURNS * threadgroups and longest <= share:
        return best
    if len(lengths) > threadgroups:
        # Each threadgroup takes every n-th piece; or the last turn begins once the earlier end.
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
    """Cut each row's keys ``starts .. ends - 1`` at the multiples of ``span``.

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
    """Return how many elements come before each of these counts."""
    return counts.cumsum() - counts
