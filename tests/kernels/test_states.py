"""The kernels of recurrent layers as C++, and the layers that use them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.ssm import ssm_attn

from mlx_parallm.worker.layers.state_kernels import (
    ConvolutionKernel,
    DeltaKernel,
    ScanKernel,
    convolution_error,
    delta_error,
    scan_error,
    why_not_convolution,
    why_not_delta,
    why_not_scan,
)
from mlx_parallm.worker.layers.state_layers import (
    DeltaSeam,
    RowConvolution,
    ScanSeam,
    use_state_layers,
)
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS, CudaShim

SHAPE = (1, 2, 1, 2, 32, 8)
ROUNDING = {mx.float32: 1e-5, mx.bfloat16: 0.01, mx.float16: 2e-3}


@pytest.mark.parametrize(
    ("shape", "gates", "dtype"),
    [
        (SHAPE, 1, mx.float16),
        (SHAPE, 32, mx.bfloat16),  # one gate a column
        ((3, 1, 2, 2, 64, 4), 1, mx.float32),  # a last threadgroup that is not full
        ((1, 3, 1, 3, 128, 4), 128, mx.float32),
        ((1, 1, 1, 1, 96, 4), 1, mx.float32),
        ((1, 2, 2, 4, 256, 4), 1, mx.bfloat16),
    ],
)
def test_the_rule_is_mlx_lms(shape: tuple[int, ...], gates: int, dtype: mx.Dtype) -> None:
    require_compiler()
    shim = CudaShim()
    for shim.order in ORDERS:
        assert delta_error(DeltaKernel(shim), shape, dtype, gates) < ROUNDING[dtype]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 1, 3, 32, 8), mx.float32),
        ((1, 2, 4, 64, 4), mx.float16),
        ((1, 1, 2, 128, 4), mx.bfloat16),
        ((1, 3, 3, 256, 4), mx.float32),
    ],
)
def test_one_token_of_a_state_space_is_mlx_lms(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    require_compiler()
    shim = CudaShim()
    for shim.order in ORDERS:
        assert scan_error(ScanKernel(shim), shape, dtype) < ROUNDING[dtype]


@pytest.mark.parametrize(
    ("channels", "width", "dtype"),
    [(1, 1, mx.float16), (40, 4, mx.bfloat16), (300, 3, mx.float32)],
)
def test_convolutions_are_right(channels: int, width: int, dtype: mx.Dtype) -> None:
    require_compiler()
    weight = mx.random.normal((channels, width, 1), key=mx.random.key(3)).astype(dtype)
    assert convolution_error(ConvolutionKernel(CudaShim()), weight) < ROUNDING[dtype]


@pytest.mark.parametrize(
    "wrong", ["far /= 2", "*= decay", "- sums[r]", "+= key * deltas", "/ (V_HEADS / K_HEADS)"]
)
def test_a_wrong_rule_is_not_used(wrong: str) -> None:
    require_compiler()
    shim = CudaShim()
    assert why_not_delta(DeltaKernel(shim), SHAPE, mx.float32, 1) is None
    changed = {"far /= 2": "far /= 4", "*= decay": "*= 1.0f", "- sums[r]": "+ sums[r]"}
    changed["+= key * deltas"] = "-= key * deltas"
    changed["/ (V_HEADS / K_HEADS)"] = "% K_HEADS"

    def mutate(_: str, body: str) -> str:
        assert wrong in body
        return body.replace(wrong, changed[wrong])

    shim.mutate = mutate
    shape = (1, 2, 2, 4, 32, 8)
    reason = why_not_delta(DeltaKernel(shim), shape, mx.float32, 1)
    assert reason is not None
    assert "off by" in reason


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("* decay[at]", ""), ("/ (HEADS / GROUPS)", "% GROUPS"), ("far /= 2", "far /= 4")],
)
def test_a_wrong_state_space_is_not_used(right: str, wrong: str) -> None:
    require_compiler()
    shim, shape = CudaShim(), (1, 2, 4, 32, 4)
    assert why_not_scan(ScanKernel(shim), shape, mx.float32) is None
    shim.mutate = lambda _, body: body.replace(right, wrong)
    reason = why_not_scan(ScanKernel(shim), shape, mx.float32)
    assert reason is not None
    assert "off by" in reason


def test_a_wrong_convolution_is_not_used() -> None:
    require_compiler()
    shim = CudaShim()
    weight = mx.random.normal((8, 4, 1), key=mx.random.key(3))
    assert why_not_convolution(ConvolutionKernel(shim), weight) is None
    shim.mutate = lambda _, body: body.replace("channel * WIDTH + i", "channel * WIDTH")
    assert why_not_convolution(ConvolutionKernel(shim), weight) is not None
    reason = why_not_convolution(ConvolutionKernel(shim), weight.astype(mx.int32))
    assert reason == "weights of mlx.core.int32"


def rule_inputs(dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    keys = iter(mx.random.split(mx.random.key(9), 6))
    sizes = ((1, 2, 1, 32), (1, 2, 1, 32), (1, 2, 2, 8), (1, 2, 2), (1, 2, 2), (1, 2, 8, 32))
    q, k, v, g, beta, state = (mx.random.normal(size, key=next(keys)) for size in sizes)
    return [q.astype(dtype), k.astype(dtype), v.astype(dtype), mx.sigmoid(g), beta, state]


def test_the_kernel_computes_in_forwards_of_ours_only() -> None:
    require_compiler()
    shim, calls = CudaShim(), []
    shim.mutate = lambda name, body: calls.append(name) or body
    seam = DeltaSeam(gated_delta_ops, DeltaKernel(shim))
    inputs = rule_inputs()
    wanted = gated_delta_ops(*inputs)
    assert all(mx.array_equal(*pair) for pair in zip(seam(*inputs), wanted, strict=True))
    assert not calls
    seam.step = SimpleNamespace()
    actual = seam(*inputs)
    assert len(calls) == 1, "made for the check, and kept"
    assert all(mx.allclose(*pair, atol=1e-5) for pair in zip(actual, wanted, strict=True))
    # A masked token leaves the state; mlx_lm computes states of other dtypes.
    mask = mx.array([[True, False]])
    q, k, v, g, beta, state = inputs
    masked = seam(q, k, v, g, beta, state, mask)[1]
    assert mx.allclose(masked, gated_delta_ops(q, k, v, g, beta, state, mask)[1], atol=1e-5)
    seam(q, k, v, g, beta, state.astype(mx.bfloat16))
    assert len(calls) == 1


def test_tokens_of_state_spaces_are_the_kernels_and_prompts_mlx_lms() -> None:
    require_compiler()
    shim, calls = CudaShim(), list[str]()
    shim.mutate = lambda name, body: calls.append(name) or body
    seam = ScanSeam(ssm_attn, ScanKernel(shim))

    def inputs(tokens: int) -> Any:
        keys = iter(mx.random.split(mx.random.key(9), 8))
        sizes = [(3, tokens, 4, 8), (4,), (3, tokens, 2, 32), (3, tokens, 2, 32), (4,)]
        sizes += [(3, tokens, 4), (4,), (3, 4, 8, 32)]
        return [mx.random.normal(size, key=next(keys)) for size in sizes]

    for tokens, is_ours, num_calls in [(1, False, 0), (1, True, 1), (2, True, 1)]:
        arrays = inputs(tokens)
        wanted = ssm_attn(*arrays, mask=None, lengths=None)
        seam.step = SimpleNamespace() if is_ours else None
        actual = seam(*arrays, mask=None, lengths=None)
        assert len(calls) == num_calls
        assert all(mx.allclose(*pair, atol=1e-4) for pair in zip(actual, wanted, strict=True))


def test_where_the_kernel_is_wrong_mlx_lm_computes() -> None:
    require_compiler()
    shim = CudaShim()
    shim.mutate = lambda _, body: body.replace("- sums[r]", "+ sums[r]")
    seam = DeltaSeam(gated_delta_ops, DeltaKernel(shim))
    seam.step = SimpleNamespace()
    inputs = rule_inputs()
    pairs = zip(seam(*inputs), gated_delta_ops(*inputs), strict=True)
    assert all(mx.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("bias", [False, True])
def test_short_convolutions_of_a_model_use_the_kernel(bias: bool) -> None:
    require_compiler()
    layer = nn.Conv1d(24, 24, 4, groups=24, bias=bias)
    x = mx.random.normal((2, 6, 24), key=mx.random.key(4))
    wanted = layer(x)
    assert use_state_layers(layer, ConvolutionKernel(CudaShim())) == 1
    assert type(layer) is RowConvolution
    assert mx.allclose(layer(x), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(8, 8, 4),
        nn.Conv1d(8, 8, 4, groups=4),
        nn.Conv1d(8, 8, 4, groups=8, padding=3),
        nn.Conv1d(8, 8, 4, groups=8, stride=2),
        nn.Conv1d(8, 8, 4, groups=8, dilation=2),
    ],
)
def test_other_convolutions_are_left_to_mlx(layer: nn.Conv1d) -> None:
    require_compiler()
    assert use_state_layers(layer, ConvolutionKernel(CudaShim())) == 0
