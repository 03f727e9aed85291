"""Random sources of encoder-decoders, so that no file has to hold them."""

from __future__ import annotations

import numpy as np

#: ``FIRST_ID``: smaller ids are special tokens.
FIRST_ID = 4


def golden_ids(seed: int, length: int, vocab_size: int) -> list[int]:
    """Return token ids of a text, or of a decoder's prompt, which depend on the seed."""
    # RandomState's numbers are promised to stay the same in every version of NumPy.
    return np.random.RandomState(seed).randint(FIRST_ID, vocab_size, length).tolist()
