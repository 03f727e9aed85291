"""Sources of encoder-decoders, and rows of cross-attention over them."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.worker.attention.quantisation import KVQuantisation
from tests.builders.kernel_cases import Case

#: ``SOURCES``: lengths at and beside the ends of blocks of 16; the last is cut by kernels.
SOURCES = ((0, 1), (0, 15), (0, 16), (0, 17), (0, 64), (0, 300))
#: ``ROWS``: the sources that rows attend to; several rows share one.
ROWS = (5, 0, 1, 5, 2, 3, 4, 3, 0, 5, 2)


def source_cases() -> list[Case]:
    """Return layers of the models: D 64 and 128, 16 bits, grouped heads and quantised KV."""
    bits8, bits4 = KVQuantisation(bits=8), KVQuantisation(bits=4, group_size=32)
    return [
        Case(sequences=SOURCES, heads=4, kv_heads=4),
        Case(sequences=SOURCES, key_dim=128, dtype=mx.bfloat16, heads=2, kv_heads=2),
        Case(sequences=SOURCES, key_dim=128, dtype=mx.float16),
        Case(sequences=SOURCES, block_size=4),
        Case(sequences=SOURCES, quantisation=bits8, heads=4, kv_heads=4),
        Case(sequences=SOURCES, quantisation=bits4, key_dim=128, dtype=mx.bfloat16),
    ]
