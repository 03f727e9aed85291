"""Batches of translations that a program draws while the model trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo.translate.items import DIRECTIONS, MAX_DIGITS, draw, texts
from demo.translate.vocabulary import PAD_ID

POOL = 64
"""Batches whose rows are drawn together, to be sorted by length."""
MULTIPLE = 4
"""Lengths are rounded up to it, so that few shapes are compiled."""
FIRST_DIGITS, POOLS_PER_DIGIT = 3, 4
"""Training begins with short numbers alone; every so many pools their longest grow by a digit."""
LAST_POOL = POOLS_PER_DIGIT * (MAX_DIGITS - FIRST_DIGITS)
"""The first pool with numbers of all lengths."""
KIND_SHARES = {"number": 3, "money": 2, "date": 2}

Ids = npt.NDArray[np.int32]


class Batch(NamedTuple):
    """Ids of sources ``[B, S]`` and targets ``[B, L]``, padded at the right."""

    sources: Ids
    targets: Ids


def batches(tokenizer: Tokenizer, rows: int, seed: int, first_pool: int = 0) -> Iterator[Batch]:
    """Yield batches of new translations of the training split without end."""
    rng = Random(seed)
    for pool in count(first_pool):
        longest = min(MAX_DIGITS, FIRST_DIGITS + pool // POOLS_PER_DIGIT)
        pairs = [_pair(rng, longest) for _ in range(rows * POOL)]
        sources = [each.ids for each in tokenizer.encode_batch_fast([pair[0] for pair in pairs])]
        targets = [each.ids for each in tokenizer.encode_batch_fast([pair[1] for pair in pairs])]
        # Only padded lengths count, so that kinds and directions of one length stay mixed.
        order = sorted(
            range(len(pairs)), key=lambda row: (_rounded(targets[row]), _rounded(sources[row]))
        )
        groups = [order[start : start + rows] for start in range(0, len(order), rows)]
        rng.shuffle(groups)
        for group in groups:
            yield Batch(*(padded([side[row] for row in group]) for side in (sources, targets)))


def _pair(rng: Random, longest: int) -> tuple[str, str]:
    kinds = list(KIND_SHARES) if longest > FIRST_DIGITS else ["number"]
    kind = rng.choices(kinds, [KIND_SHARES[kind] for kind in kinds])[0]
    direction = rng.choice(DIRECTIONS)
    written = texts(draw(rng, kind, "train", longest))
    return direction.prefix + written[direction.source], written[direction.target]


def _rounded(ids: Sequence[int]) -> int:
    return -(-len(ids) // MULTIPLE) * MULTIPLE


def padded(ids: Sequence[Sequence[int]]) -> Ids:
    """Return ids ``[rows, length]``, padded at the right."""
    length = max(map(_rounded, ids))
    array = np.full((len(ids), length), PAD_ID, dtype=np.int32)
    for row, row_ids in enumerate(ids):
        array[row, : len(row_ids)] = row_ids
    return array
