"""The linear kernel of experts as C++, and the layers that use it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from mlx_parallm.worker.layers.expert_kernel import (
    MAX_ROWS_EACH,
    ExpertKernel,
    RowSwitchLinear,
    serves,
    use_expert_layers,
    why_not,
)
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS
from tests.kernels.tensor_shim import TensorShim


def error(kernel: ExpertKernel, chosen: Sequence[int], shape: tuple[int, int, int]) -> float:
    """Return the largest error as a share of the largest value."""
    weight = mx.random.normal(shape, mx.bfloat16, key=mx.random.key(2))
    x = mx.random.normal((len(chosen), 1, shape[2]), mx.bfloat16, key=mx.random.key(1))
    actual = kernel(x, mx.array(list(chosen), mx.uint32), weight)
    assert actual.shape == (len(chosen), 1, shape[1])
    wide, rows = weight.astype(mx.float32), x.astype(mx.float32)
    wanted = mx.stack([rows[i] @ wide[expert].T for i, expert in enumerate(chosen)])
    return float(mx.abs(actual - wanted).max() / mx.abs(wanted).max())


@pytest.mark.parametrize(
    ("chosen", "shape"),
    [
        ([0], (1, 16, 32)),
        ([0, 0, 2], (4, 24, 96)),  # experts without rows before, between and after
        ([1] * 9 + [3] * 17, (4, 16, 64)),  # more rows than a tile
        ([0, 1, 2, 3], (4, 5, 288)),  # fewer rows of the weight than a threadgroup takes
    ],
)
def test_products_are_right_in_every_order(chosen: list[int], shape: tuple[int, int, int]) -> None:
    require_compiler()
    shim = TensorShim()
    for shim.order in ORDERS:
        assert error(ExpertKernel(shim), chosen, shape) < 0.01


def test_every_barrier_is_needed() -> None:
    require_compiler()
    for number in range(2):
        shim = TensorShim()
        shim.mutate = lambda _, body, number=number: _without(body, "__syncthreads();", number)
        errors = []
        for shim.order in ORDERS:
            errors.append(error(ExpertKernel(shim), [1] * 20, (2, 16, 512)))
        assert not max(errors) < 0.01, number


def _without(body: str, text: str, number: int) -> str:
    parts = body.split(text)
    assert len(parts) == 3
    return text.join(parts[: number + 1]) + text.join(parts[number + 1 :])


def test_a_wrong_kernel_is_not_used() -> None:
    require_compiler()
    weight = mx.random.normal((3, 24, 64), mx.bfloat16, key=mx.random.key(0))
    assert why_not(ExpertKernel(TensorShim()), weight) is None
    for wrong in ("ids[middle] < expert", "at * 8"):
        shim = TensorShim()
        shim.mutate = lambda _, body, wrong=wrong: body.replace(wrong, wrong[:-1] + "0")
        reason = why_not(ExpertKernel(shim), weight)
        assert reason is not None, wrong


@pytest.mark.parametrize(
    ("weight", "reason"),
    [(mx.zeros((2, 8, 64)), "float32"), (mx.zeros((2, 8, 40), mx.float16), "40")],
)
def test_what_it_does_not_serve(weight: mx.array, reason: str) -> None:
    actual = why_not(ExpertKernel(TensorShim()), weight)
    assert actual is not None
    assert reason in actual


def test_a_blocks_experts_use_it_for_sorted_rows_and_mlx_otherwise() -> None:
    require_compiler()
    mx.random.seed(0)
    block = SwitchGLU(32, 64, 16)
    block.set_dtype(mx.bfloat16)
    x = mx.random.normal((16, 1, 32), mx.bfloat16, key=mx.random.key(3))
    experts = mx.random.randint(0, 16, (16, 1, 4), key=mx.random.key(4)).astype(mx.uint32)
    # MLX's own product on the CPU takes float32 only.
    block.set_dtype(mx.float32)
    wanted = block(x.astype(mx.float32), experts)
    block.set_dtype(mx.bfloat16)
    block.eval()
    assert use_expert_layers(block, ExpertKernel(TensorShim())) == 3
    names = [name for name, module in block.named_modules() if type(module) is RowSwitchLinear]
    assert sorted(names) == ["down_proj", "gate_proj", "up_proj"]
    largest = mx.abs(wanted).max()
    assert mx.abs(block(x, experts) - wanted).max() < 0.02 * largest
    with pytest.raises(RuntimeError, match="GatherMM"):
        mx.eval(block(x[:2], experts[:2]))


def test_biases_and_many_rows_are_left_to_mlx() -> None:
    layer = SwitchLinear(32, 8, 2, bias=True)
    layer.set_dtype(mx.bfloat16)
    assert use_expert_layers(layer, ExpertKernel(TensorShim())) == 0
    weight = mx.zeros((2, 8, 32), mx.bfloat16)
    for rows in (2 * MAX_ROWS_EACH, 2 * MAX_ROWS_EACH + 1):
        x, chosen = mx.zeros((rows, 1, 32), mx.bfloat16), mx.zeros(rows, mx.uint32)
        assert serves(x, chosen, weight) == (rows == 2 * MAX_ROWS_EACH)
    assert not serves(mx.zeros((2, 1, 32)), mx.zeros(2, mx.uint32), weight)
