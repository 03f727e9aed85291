"""Adapted layers with one common input: no forward reuses results of another."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.worker.layers.row_layers import part_of, use_row_layers
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.change_kernels import ChangeKernels
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import AdapterRows
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import CudaShim

SIZE = 16
NAMES = ("q_proj", "k_proj")


class Block(nn.Module):
    """Two layers that models call with the same input."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(SIZE, SIZE, bias=bias)
        self.k_proj = nn.Linear(SIZE, SIZE, bias=bias)


def low_rank(seed: int, *, dora: bool = False) -> LowRank:
    source = np.random.default_rng(seed)
    a, b = (
        HostTensor(source.standard_normal(shape, dtype=np.float32))
        for shape in ((4, SIZE), (SIZE, 4))
    )
    magnitude = HostTensor(source.uniform(1, 2, SIZE).astype(np.float32)) if dora else None
    return LowRank(kind="linear", a=a, b=b, scale=1.0, magnitude=magnitude)


def adapter(seed: int, *, dora: bool = False) -> AdapterWeights:
    return AdapterWeights({name: low_rank(seed + i, dora=dora) for i, name in enumerate(NAMES)})


@pytest.fixture(params=[False, True], ids=["stock", "kernels"])
def context(request: pytest.FixtureRequest) -> AdapterContext:
    made = AdapterContext()
    if request.param:
        require_compiler()
        made.kernels = ChangeKernels(CudaShim())
    return made


def adapted(
    context: AdapterContext, *, bias: bool = False, dora: bool = False
) -> tuple[Block, AdaptedLayers]:
    """Return a block with adapter 0 in slot 1, and its adapted layers."""
    block = Block(bias=bias)
    mx.eval(block.parameters())
    layers = AdaptedLayers(block, mx.float32, context)
    layers.put(1, adapter(0, dora=dora), param="adapter")
    return block, layers


def wanted(layer: Any, change: LowRank, x: mx.array) -> mx.array:
    weight = layer.weight + change.scale * (to_mlx(change.b) @ to_mlx(change.a))
    if change.magnitude is not None:
        weight = weight * (to_mlx(change.magnitude) / mx.linalg.norm(weight, axis=1))[:, None]
    return x @ weight.T + (layer.bias if "bias" in layer else 0)


def rows_of(*slots: int) -> AdapterRows:
    return AdapterRows(mx.array(slots, mx.int32))


def random_rows(count: int) -> mx.array:
    return mx.random.normal((count, 1, SIZE), key=mx.random.key(3))


def test_a_bias_that_was_replaced_is_heeded(context: AdapterContext) -> None:
    block, layers = adapted(context, bias=True, dora=True)
    x, change = random_rows(2), low_rank(0, dora=True)
    with context.during(rows_of(1, 1)):
        assert mx.allclose(block.q_proj(x), wanted(block.q_proj, change, x), atol=1e-4)
    block.q_proj.update({"bias": mx.full((SIZE,), 5.0)})
    layers.refresh()
    with context.during(rows_of(1, 1)):
        assert mx.allclose(block.q_proj(x), wanted(block.q_proj, change, x), atol=1e-4)


def test_outputs_for_other_rows_are_not_given_out(context: AdapterContext) -> None:
    block, _ = adapted(context)
    x = random_rows(2)
    with context.during(rows_of(1, 1)):
        block.q_proj(x)
    with context.during(rows_of(0, 1)):
        actual = block.k_proj(x)
    assert mx.allclose(actual[0], block.k_proj(x)[0], atol=1e-4)
    assert mx.allclose(actual[1], wanted(block.k_proj, low_rank(1), x)[1], atol=1e-4)


def test_outputs_of_the_adapter_before_are_not_given_out(context: AdapterContext) -> None:
    block, layers = adapted(context)
    x, rows = random_rows(2), rows_of(1, 1)
    with context.during(rows):
        block.q_proj(x)
    layers.put(1, adapter(7), param="adapter")
    with context.during(rows):
        assert mx.allclose(block.k_proj(x), wanted(block.k_proj, low_rank(8), x), atol=1e-4)


def test_one_slot_may_stand_for_all_positions(context: AdapterContext) -> None:
    block, _ = adapted(context)
    x = random_rows(5)
    with context.during(rows_of(1)):
        assert mx.allclose(block.q_proj(x), wanted(block.q_proj, low_rank(0), x), atol=1e-4)


def test_slots_and_inputs_may_lie_apart(context: AdapterContext) -> None:
    block, _ = adapted(context)
    x = mx.random.normal((SIZE, 7), key=mx.random.key(3)).T[1:6][:, None]
    slots = mx.array([[0, 9], [1, 9], [1, 9], [0, 9], [1, 9]], mx.int32)[:, 0]
    with context.during(AdapterRows(slots)):
        actual = block.q_proj(x)
    changed = wanted(block.q_proj, low_rank(0), x)
    expected = mx.where((slots == 1)[:, None, None], changed, x @ block.q_proj.weight.T)
    assert mx.allclose(actual, expected, atol=1e-4)


class Gated(nn.Module):
    """Two layers whose weights are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(SIZE, SIZE, bias=False)
        self.up_proj = nn.Linear(SIZE, SIZE, bias=False)
        mx.eval(self.parameters())
        # As loaded models are: kernels are not for training.
        self.eval()
        use_row_layers(self, None)


@pytest.mark.parametrize("rows", [1, 2, 32, 64])
def test_outputs_that_were_multiplied_at_once_may_be_changed_apart(
    context: AdapterContext, rows: int
) -> None:
    block = Gated()
    layers = AdaptedLayers(block, mx.float32, context)
    layers.put(1, AdapterWeights({"up_proj": low_rank(1)}), param="adapter")
    x, slots = random_rows(rows), rows_of(*(row % 2 for row in range(rows)))
    is_changed = slots.slots[:, None, None] == 1

    def check(layer: Any, change: LowRank | None) -> None:
        with context.during(slots):
            actual = layer(x)
        plain = x @ layer.weight.T
        expected = plain if change is None else wanted(layer, change, x)
        assert mx.allclose(actual, mx.where(is_changed, expected, plain), atol=1e-4)

    # The second layer runs alone; its columns come after the first layer's.
    check(block.up_proj, low_rank(1))
    check(block.gate_proj, None)
    both = {"gate_proj": low_rank(5), "up_proj": low_rank(6)}
    layers.put(1, AdapterWeights(both), param="adapter")
    check(block.up_proj, low_rank(6))
    check(block.gate_proj, low_rank(5))


def test_kernels_get_the_matrix_of_layers_that_were_multiplied_at_once() -> None:
    block, x = Gated(), random_rows(2)
    parts = [part_of(layer, layer, x) for layer in (block.gate_proj, block.up_proj)]
    assert parts[0].columns.matrix is parts[1].columns.matrix
    assert [part.columns.first for part in parts] == [0, SIZE]
    for part in parts:
        first = part.columns.first
        assert mx.array_equal(part.output, part.columns.matrix[..., first : first + SIZE])
