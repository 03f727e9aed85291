"""Rows to sample, the kernels that sample them, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels
from mlx_parallm.worker.sampling.row_settings import RowSettings
from mlx_parallm.worker.sampling.sampler import SampleResult
from tests.kernels.shim_language import Shim

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
VOCAB, THREADS = 600, 64
TRUNCATIONS: list[dict[str, Any]] = [
    {},
    *({"top_k": k} for k in (1, 2, 31, VOCAB - 1, VOCAB, VOCAB + 5)),
    *({"top_p": p} for p in (1e-30, 0.3, 0.95, 0.99999)),
    *({"min_p": p} for p in (1e-6, 0.3, 1.0)),
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.1},
    {"top_k": 500, "top_p": 0.9, "min_p": 0.001},
]


def spec(seed: int = 0, position: int = 3, **params: Any) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(**params),
        seed=seed,
        position=position,
        prompt_ids=(),
        output_ids=(),
    )


def drawn(
    kernels: SamplingKernels, logits: mx.array, specs: Sequence[SampleSpec]
) -> tuple[list[int], mx.array]:
    rows = RowSettings(specs)
    tokens, floors = kernels.draw(logits, rows.settings, rows.keys(specs))
    return np.array(tokens).tolist(), floors[:, None]


def trusted(shim: Shim, *dtypes: mx.Dtype) -> SamplingKernels:
    kernels = SamplingKernels(shim, threads=THREADS)
    for dtype in dtypes:
        kernels.trust(VOCAB, dtype)
        kernels.trust_greedy(VOCAB, dtype)
    return kernels


def tokens_of(result: SampleResult, rows: int) -> list[object]:
    mx.eval(result.arrays())
    return [
        (row.token_id, row.logprob and [token for token, _ in row.logprob.top])
        for row in result.to_python(range(rows))
    ]


def values_of(result: SampleResult, rows: int) -> list[list[float]]:
    entries = [token.logprob for token in result.to_python(range(rows))]
    return [
        [entry.logprob, entry.entropy or 0.0, *(value for _, value in entry.top)] if entry else []
        for entry in entries
    ]
