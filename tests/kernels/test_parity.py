"""The kernels' very texts, run on the CPU, agree with softmax attention on many shapes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from benchmarks.gpu.kernel_cases import TOLERANCES, Case, Trial
from mlx_parallm.attention.kernel_backend import KernelAttention
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_dialect import ORDERS, CudaShim, MetalShim, Shim

SHORT = ((70, 1), (3, 1), (16, 3), (0, 1))
#: Long enough to be cut in many; chunks of stock attention and short ones between decode rows.
LONG = ((700, 1), (20, 2), (130, 20), (33, 1), (0, 17))
CASES = [
    Case(sequences=SHORT),
    Case(sequences=LONG, sinks=True, dtype=mx.bfloat16, key_dim=128),
]


@pytest.fixture(params=[CudaShim, MetalShim], ids=["cuda", "metal"])
def shim(request: pytest.FixtureRequest) -> Shim:
    require_compiler()
    return request.param()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_right_in_every_order_of_threads(shim: Shim, case: Case) -> None:
    trial = Trial(case)
    backend = KernelAttention(case.block_size, shim)
    for order in ORDERS:
        shim.order = order
        error = trial.error(trial.run(backend, trial.fill(backend, poison=True)))
        assert error <= TOLERANCES[case.dtype]
