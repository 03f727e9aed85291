"""The kernels of blocks as C++: they agree with MLX, and every part of their texts is needed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.activations import swiglu

from mlx_parallm.kernels.kernel import kernel_text
from mlx_parallm.worker.layers.block_kernels import (
    MAX_ERROR,
    MAX_SIZE,
    BlockKernels,
    gate_error,
    gated,
    norm_error,
    run_block,
    why_no_gate,
    why_no_norm,
)
from mlx_parallm.worker.layers.kernels import TEXTS
from tests.kernels.mutation import SYNCHRONISATION, leave_out
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS, CudaShim

pytestmark = pytest.mark.slow

NORM = kernel_text(TEXTS / "add_norm.cu")
NUM_NORM = len(re.findall(SYNCHRONISATION[".cu"], NORM))
NORM_MISTAKES = {
    "a sum instead of a mean": ("total / SIZE", "total"),
    "without the change": ("+ float(other.at[i])", ""),
    "no epsilon": ("+ EPSILON", "+ 0.5f"),
    "no weight": ("* float(factors.at[i])", ""),
}
GATE_MISTAKES = {
    "another base": ("-x * LOG2E", "-x"),
    "the gate itself": ("+ FIRST_NUMBER +", "+ FIRST_GATE +"),
    "no gate": ("T(x * sigmoid)", "T(sigmoid)"),
}


def norm_of(size: int, dtype: mx.Dtype) -> nn.RMSNorm:
    """Return a norm with random weights."""
    norm = nn.RMSNorm(size, eps=1e-5)
    norm.weight = mx.random.normal((size,), key=mx.random.key(1)).astype(dtype)
    return norm


def worst_norm(shim: CudaShim, size: int = 2560) -> float:
    """Return the largest error of a norm in any order of threads."""
    norm, worst = norm_of(size, mx.bfloat16), 0.0
    for order in ORDERS:
        shim.order = order
        worst = max(worst, norm_error(BlockKernels(shim), norm))
    return worst


@pytest.mark.parametrize("size", [64, 2560, 4096])
def test_residuals_and_norms_are_those_of_mlx(size: int) -> None:
    require_compiler()
    assert worst_norm(CudaShim(), size) <= MAX_ERROR


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("width", [8, 200, 1536])
def test_swiglu_is_that_of_mlx(width: int, dtype: mx.Dtype) -> None:
    require_compiler()
    assert gate_error(BlockKernels(CudaShim()), width, dtype) <= MAX_ERROR


@pytest.mark.parametrize("nth", range(NUM_NORM))
def test_nothing_can_be_left_out(nth: int) -> None:
    require_compiler()
    shim = CudaShim()
    mutated = leave_out(shim, "blocks_add_norm_", nth, ".cu")
    assert worst_norm(shim) > MAX_ERROR
    assert mutated


def test_there_is_something_to_leave_out() -> None:
    assert NUM_NORM == 2


@pytest.mark.parametrize("mistake", NORM_MISTAKES)
def test_a_mistake_in_the_norm_shows(mistake: str) -> None:
    require_compiler()
    right, wrong = NORM_MISTAKES[mistake]
    assert right in NORM
    shim = CudaShim()
    shim.mutate = lambda _, body: body.replace(right, wrong)
    assert worst_norm(shim) > MAX_ERROR


@pytest.mark.parametrize("mistake", GATE_MISTAKES)
def test_a_mistake_in_swiglu_shows(mistake: str) -> None:
    require_compiler()
    right, wrong = GATE_MISTAKES[mistake]
    assert right in kernel_text(TEXTS / "gate.cu")
    shim = CudaShim()
    shim.mutate = lambda _, body: body.replace(right, wrong)
    assert gate_error(BlockKernels(shim), 64, mx.bfloat16) > MAX_ERROR


def test_norms_that_the_kernel_does_not_take() -> None:
    kernels = BlockKernels(CudaShim())
    assert why_no_norm(kernels, norm_of(64, mx.float32)) == "RMSNorm of mlx.core.float32"
    assert why_no_norm(kernels, norm_of(36, mx.bfloat16)) == "rows of 36 numbers"
    assert why_no_norm(kernels, norm_of(MAX_SIZE + 8, mx.bfloat16)) is not None


def test_an_mlp_in_float32_is_left_to_mlx() -> None:
    mlp = SimpleNamespace(gate_proj=nn.Linear(8, 64, bias=False))
    assert why_no_gate(BlockKernels(CudaShim()), mlp) == "rows of mlx.core.float32"


def test_a_norm_of_another_type_than_its_rows_is_left_to_mlx() -> None:
    norm = norm_of(64, mx.float32)
    block: Any = nn.Module()
    block.post_attention_layernorm = norm
    block.input_layernorm = nn.Identity()
    block["_kernels"] = None
    x = mx.random.normal((3, 1, 64), mx.bfloat16, key=mx.random.key(2))
    output = run_block(block, x, lambda rows: 2 * rows, lambda rows: rows).total
    assert mx.array_equal(output, 3 * x + norm(3 * x))


@pytest.mark.parametrize("kinds", [(mx.bfloat16, mx.float32), (mx.float16, mx.bfloat16)], ids=str)
def test_gates_of_another_type_than_what_they_multiply_are_left_to_mlx(
    kinds: tuple[mx.Dtype, mx.Dtype],
) -> None:
    mlp: Any = nn.Module()
    mlp.gate_proj, mlp.up_proj = nn.Linear(16, 64, bias=False), nn.Linear(16, 64, bias=False)
    for layer, dtype in zip((mlp.gate_proj, mlp.up_proj), kinds, strict=True):
        layer.set_dtype(dtype)
    mlp["_kernels"] = BlockKernels(CudaShim())
    x = mx.random.normal((3, 1, 16), mx.float16, key=mx.random.key(2))
    assert mx.array_equal(gated(mlp, x), swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
