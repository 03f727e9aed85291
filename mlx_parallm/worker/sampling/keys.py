"""Random keys of rows: two words, (seed, position)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import SampleSpec

#: ``WORD``: positions are taken modulo this.
WORD = 1 << 32
_MASK_64 = (1 << 64) - 1


def seed_word(seed: int) -> int:
    """Return a seed folded into 32 bits.

    Seeds below 2**32 stay the same, so they never collide. Others go through the finaliser of
    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    if 0 <= seed < WORD:
        return seed
    word = seed & _MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (word ^ (word >> 31)) >> 32


def random_keys(specs: Sequence[SampleSpec]) -> mx.array:
    """Return the keys of the rows' next tokens, uint32 ``[rows, 2]``."""
    words = [(seed_word(spec.seed), spec.position % WORD) for spec in specs]
    return mx.array(np.array(words, dtype=np.uint32))
