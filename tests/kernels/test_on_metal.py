"""Kernels on the GPU of a Mac: every text is compiled by Metal's compiler, launched and right."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlx_parallm.config import KV_CACHE_DTYPES
from mlx_parallm.kernels.language import METAL_TUNINGS, MetalLanguage
from mlx_parallm.worker.attention.check import MAX_ERROR, MAX_MISREAD, miscopies, misread_share
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.kernel_pool import why_unsupported
from mlx_parallm.worker.attention.quantisation import quantisation_of
from mlx_parallm.worker.lora import adapter_check
from mlx_parallm.worker.lora.change_kernels import ChangeKernels
from mlx_parallm.worker.sampling import check as sampling_check
from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels
from tests.builders.kernel_cases import Case, Trial
from tests.kernels.test_metal import DTYPES, all_cases
from tests.kernels.test_parity import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not mx.metal.is_available(), reason="needs the GPU of a Mac"),
]

#: ``SAMPLE``: so many of the layers that are compiled by clang elsewhere.
SAMPLE = 40


@pytest.mark.parametrize(
    "case", [*CASES, *random.Random(0).sample([*all_cases()], SAMPLE)], ids=str
)
def test_attention_is_right(case: Case) -> None:
    trial = Trial(case)
    for tuning in METAL_TUNINGS:
        backend = KernelAttention(
            case.block_size, MetalLanguage(), quantisation=case.quantisation, tuning=tuning
        )
        if why_unsupported(backend.layout(case.shape)) is not None:
            pytest.skip("kernels do not support the layer")
        error = trial.error(trial.run(backend, trial.fill(backend, poison=True)))
        # A server takes kernels with this error.
        assert error <= MAX_ERROR[case.dtype], tuning


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_blocks_are_read_and_copied_as_they_were_written(kv_cache_dtype: str) -> None:
    backend = KernelAttention(16, MetalLanguage(), quantisation=quantisation_of(kv_cache_dtype))
    assert misread_share(backend) <= MAX_MISREAD
    assert not miscopies(backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampling_is_right(dtype: mx.Dtype) -> None:
    kernels = SamplingKernels(MetalLanguage())
    assert sampling_check.why_not(kernels, sampling_check.REPORT_VOCAB, dtype) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_are_right(dtype: mx.Dtype) -> None:
    assert adapter_check.why_not(ChangeKernels(MetalLanguage()), dtype) is None
