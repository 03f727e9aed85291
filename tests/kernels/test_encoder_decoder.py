"""An encoder-decoder over the kernels: biased rows, and rows of cross-attention, in one batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlx_parallm.types.model_input import source_of
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from tests.kernels.shim_language import Shim
from tests.source_batches import (
    BLOCK_SIZE,
    Batch,
    Request,
    alone,
    assert_same,
    new_runner,
    random_text,
    tiny_t5,
)

pytestmark = pytest.mark.slow

#: ``LENGTHS`` of sources and decoder prompts: a long chunk, and keys that are cut.
LENGTHS = ((33, 1), (1, 40), (150, 7), (4, 1))


@pytest.mark.parametrize("fields", [{}, {"model_type": "umt5"}], ids=["t5", "umt5"])
def test_a_batch_gives_each_request_what_it_gets_alone(shim: Shim, fields: dict[str, Any]) -> None:
    loaded, rng = tiny_t5(**fields), random.Random(0)
    requests = [
        Request(source_of(random_text(rng, source)), random_text(rng, prompt))
        for source, prompt in LENGTHS
    ]
    expected = [alone(loaded, request) for request in requests]
    runner = new_runner(loaded, KernelAttention(BLOCK_SIZE, shim))
    assert_same(Batch(runner).run(requests), expected)
