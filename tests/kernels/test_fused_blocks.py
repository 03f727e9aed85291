"""Blocks of packed weights whose products compute what is around them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.kernels.kernel import kernel_text
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.device.kernel_trial import KernelTrials
from mlx_parallm.worker.generation.paged_cache import PackedStep, PagedLayerCache
from mlx_parallm.worker.generation.seam import ModelSeams
from mlx_parallm.worker.layers.attention_heads import use_head_kernels
from mlx_parallm.worker.layers.block_kernels import BlockKernels, use_block_kernels
from mlx_parallm.worker.layers.fused_blocks import Fusion, fused_block, use_fused_blocks
from mlx_parallm.worker.layers.packed import PackedProducts, use_packed_kernels
from mlx_parallm.worker.layers.packed_kernel import PackedKernels
from mlx_parallm.worker.layers.packing import MXFP4, Packing
from mlx_parallm.worker.layers.product_variants import GATES, Around, Tiles
from mlx_parallm.worker.layers.row_layers import use_row_layers
from mlx_parallm.worker.layers.wrapped_calls import WrappedCalls
from tests.builders.architectures.configs import config_of
from tests.builders.random_models import stock_model
from tests.kernels.shim_compile import require_compiler
from tests.kernels.tensor_shim import CountedShim, TensorShim

pytestmark = pytest.mark.slow

Q4 = Packing(4, 64)
FP4 = Packing(4, 32, MXFP4)
NO_SIZES: Mapping[str, int] = MappingProxyType({})
#: ``UNFUSED``: kernels that fused blocks do without.
UNFUSED = ("blocks_add_norm", "blocks_gate")
#: ``MISTAKES``: a part of the text, and a mistake in its place.
MISTAKES = {
    "a sum instead of a mean": ("all_squares / DEPTH", "all_squares"),
    "no weight of the norm": ("* gain", ""),
    "no epsilon": ("+ EPSILON", "+ 0.5f"),
    "the gate itself": ("* 16 + lane + 8]", "* 16 + lane]"),
    "no residual": ("float(residual[column]) +", ""),
    "the same squares for all warps": ("squares[w]", "squares[0]"),
}
#: ``GATE_MISTAKES``: the same of texts for more rows, by their name.
GATE_MISTAKES = {
    "rows": ("SUMS + OWN + column]", "SUMS + column]"),
    "tiles": ("n / 2 * 8 + n % 2]", "n % 2]"),
}
#: ``SIZES``: as small as the kernels take.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


@pytest.fixture(autouse=True)
def few_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try kernels for few rows only: hundreds take long on a CPU."""
    for module in ("packed_kernel", "fused_blocks"):
        monkeypatch.setattr(f"mlx_parallm.worker.layers.{module}.ROW_COUNTS", (1, 2, 4, 16))


def packed_model(
    packing: Packing, shim: TensorShim, name: str = "qwen3", sizes: Mapping[str, int] = NO_SIZES
) -> Any:
    """Return a tiny model with packed weights and all kernels except those of whole blocks."""
    model = stock_model(config_of(name) | SIZES | dict(sizes))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, packing.group_size, packing.bits, mode=packing.mode)
    return with_kernels(model, shim, num_packings=1 + len(sizes))


def with_kernels(model: Any, shim: TensorShim, *, num_packings: int) -> Any:
    """Give a model all kernels except those of whole blocks.

    ``num_packings`` counts those of different lengths of rows as well.
    """
    model.eval()
    mx.eval(model.parameters())
    use_row_layers(model, None)
    assert use_packed_kernels(model, PackedKernels(shim), mx.bfloat16) == num_packings
    assert use_head_kernels(model, shim)
    assert use_block_kernels(model, BlockKernels(shim))
    return model


def outputs_of(model: Any, shim: TensorShim, rows: int = 1) -> np.ndarray:
    """Return the logits of second tokens in packed forwards."""
    backend = KernelAttention(16, shim)
    shape = LayerShape(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.bfloat16)
    pools: list[LayerPool] = [backend.new_pool(shape, rows) for _ in model.model.layers]
    seams, logits = ModelSeams(model), mx.zeros(0)
    for start, token in ((0, 3), (1, 9)):
        sequences = [
            ScheduledSequence(seq_id=i, slot=i, start=start, token_ids=(1,), block_table=(i,))
            for i in range(rows)
        ]
        step = PackedStep.of(backend, sequences)
        with seams.during(step):
            caches = [PagedLayerCache(pool, None, step) for pool in pools]
            logits = model(mx.array([[token]] * rows), cache=caches)
    return np.array(logits.astype(mx.float32))


@pytest.mark.parametrize(
    ("packing", "name"),
    [(Q4, "qwen3"), (Q4, "llama"), (Packing(8, 64), "qwen3"), (FP4, "llama")],
    ids=str,
)
def test_fused_blocks_compute_the_same_with_four_kernels(packing: Packing, name: str) -> None:
    require_compiler()
    shim = CountedShim()
    model = packed_model(packing, shim, name)
    wanted = outputs_of(model, shim)
    assert use_fused_blocks(model) == len(model.model.layers)
    shim.counts.clear()
    actual = outputs_of(model, shim)
    assert np.abs(actual - wanted).max() <= 0.02 * np.abs(wanted).max()
    # Two forwards: of each block the products before attention and those after it, and the head.
    assert shim.counts["packed_vectors"] == 2 * (2 * len(model.model.layers) + 1)
    assert not any(shim.counts[kind] for kind in UNFUSED)


def test_products_of_different_packings_are_launches_of_their_own() -> None:
    require_compiler()
    shim = CountedShim()
    plain = stock_model(config_of("qwen3") | SIZES)
    plain.set_dtype(mx.bfloat16)
    nn.quantize(plain, class_predicate=eight_bits_down)
    model = with_kernels(plain, shim, num_packings=2)
    wanted = outputs_of(model, shim)
    assert use_fused_blocks(model) == len(model.model.layers)
    shim.counts.clear()
    actual = outputs_of(model, shim)
    assert np.abs(actual - wanted).max() <= 0.02 * np.abs(wanted).max()
    assert shim.counts["packed_vectors"] == 2 * (4 * len(model.model.layers) + 1)


def eight_bits_down(name: str, layer: nn.Module) -> dict[str, int] | bool:
    """Return the packing of a layer: that of ``down_proj`` is another one."""
    bits = 8 if name.endswith("down_proj") else 4
    return {"group_size": 64, "bits": bits} if hasattr(layer, "to_quantized") else False


@pytest.mark.parametrize(
    "mistake", [("x = out_1;", "x = out_0;"), ("counts[threadIdx.x] = 0", "")], ids=str
)
def test_a_chain_that_is_wrong_leaves_its_products(mistake: tuple[str, str]) -> None:
    require_compiler()
    shim = CountedShim()
    model = packed_model(Q4, shim)
    shim.mutate = lambda _, body: body.replace(*mistake)
    assert use_fused_blocks(model) == len(model.model.layers)
    assert not any("_chain" in block for block in model.model.layers)
    shim.counts.clear()
    outputs_of(model, shim)
    assert shim.counts["packed_vectors"] == 2 * (4 * len(model.model.layers) + 1)


@pytest.mark.parametrize("scales", [mx.float16, mx.float32], ids=str)
def test_scales_of_another_dtype_than_rows_are_left_to_mlx(scales: mx.Dtype) -> None:
    """Kernels would read them as numbers of the rows' dtype."""
    require_compiler()
    model = packed_model(Q4, shim := CountedShim())
    layer = model.model.layers[0].self_attn.o_proj
    for name in ("scales", "biases"):
        layer[name] = layer[name].astype(scales)
    # The trials know nothing of it, because their weights are packed in the dtype of rows.
    assert use_fused_blocks(model) == len(model.model.layers) - 1
    shim.counts.clear()
    rows = mx.random.normal((16, 1, 512), mx.bfloat16, key=mx.random.key(1))
    actual = layer(rows)
    assert actual.dtype == mx.float32
    assert not shim.counts
    wanted = rows @ Q4.unpacked([layer.weight, layer.scales, layer.biases], mx.float32).T
    assert mx.abs(actual - wanted).max() <= 0.01 * mx.abs(wanted).max()


@pytest.mark.parametrize("rows", [2, 16])
def test_blocks_of_more_rows_compute_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of gates compute SwiGLU, and threadgroups divide the depth of narrow weights."""
    require_compiler()
    split = ((16, Tiles(16, 64, 1, 4, splits=2)),)
    monkeypatch.setattr("mlx_parallm.worker.layers.product_variants.SPLIT_TILES", split)
    shim = CountedShim()
    model = packed_model(Q4, shim, sizes={"intermediate_size": 2048})
    wanted = outputs_of(model, shim, rows)
    assert use_fused_blocks(model)
    shim.counts.clear()
    actual = outputs_of(model, shim, rows)
    assert np.abs(actual - wanted).max() <= 0.02 * np.abs(wanted).max()
    # Two forwards. Kernels run when they are called here, even if nothing reads their outputs.
    layers = len(model.model.layers)
    sums = layers if rows > 8 else 0
    assert shim.counts["blocks_add_norm"] == 2 * (2 * layers - 1 + sums)
    assert shim.counts["blocks_gate"] == 0


def test_gates_without_a_variant_have_a_kernel_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_compiler()
    few = ((16, Tiles(16, 64, 1, 4)),)
    monkeypatch.setattr("mlx_parallm.worker.layers.product_variants.NARROW_TILES", few)
    shim = CountedShim()
    model = packed_model(Q4, shim)
    wanted = outputs_of(model, shim, 24)
    assert use_fused_blocks(model)
    shim.counts.clear()
    actual = outputs_of(model, shim, 24)
    assert np.abs(actual - wanted).max() <= 0.02 * np.abs(wanted).max()
    assert shim.counts["blocks_gate"] == 2 * len(model.model.layers)


@pytest.mark.parametrize("rows", [1, 16])
def test_wrapped_layers_are_called(rows: int) -> None:
    """Adapters and ranks wrap the calls of layers, whose products are then not their outputs."""
    require_compiler()
    shim = CountedShim()
    model = packed_model(Q4, shim)
    assert use_fused_blocks(model)
    block = model.model.layers[0]
    x = mx.zeros((rows, 1, 512), mx.bfloat16)
    assert fused_block(block, x) is not None
    plain = outputs_of(model, shim, rows)

    def wrapped(original: Any) -> dict[str, Any]:
        return {"__call__": lambda self, x: 1.5 * original.__call__(self, x)}

    for module in (block.self_attn.o_proj, block.mlp.up_proj, block.mlp, block.input_layernorm):
        with WrappedCalls([module], wrapped):
            assert fused_block(block, x) is None
            changed = outputs_of(model, shim, rows)
        assert np.abs(changed - plain).max() > 0.02 * np.abs(plain).max()
    assert np.array_equal(outputs_of(model, shim, rows), plain)


def test_gates_of_more_rows_that_are_wrong_leave_one_row_fused() -> None:
    require_compiler()
    shim = CountedShim()
    model = packed_model(Q4, shim)
    shim.mutate = lambda name, body: body.replace(*GATE_MISTAKES["tiles"])
    assert use_fused_blocks(model)
    assert not any("_gates" in block for block in model.model.layers)
    shim.counts.clear()
    outputs_of(model, shim, 16)
    assert shim.counts["blocks_gate"] == 2 * len(model.model.layers)


def test_rows_of_another_type_run_as_usual() -> None:
    require_compiler()
    model = packed_model(Q4, shim := TensorShim())
    assert use_fused_blocks(model)
    assert fused_block(model.model.layers[0], mx.zeros((1, 1, 512), mx.float16)) is None
    assert shim.order == 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str) -> None:
    require_compiler()
    right, wrong = MISTAKES[mistake]
    assert kernel_text(TEXTS / "packed" / "vectors.cu").count(right) == 1
    shim = TensorShim()
    assert not any(fusion.why_not() for fusion in fusions(shim))
    shim.mutate = lambda _, body: body.replace(right, wrong)
    assert any(fusion.why_not() for fusion in fusions(shim))


@pytest.mark.parametrize("name", GATE_MISTAKES)
def test_a_mistake_in_gates_of_more_rows_shows(name: str) -> None:
    require_compiler()
    right, wrong = GATE_MISTAKES[name]
    assert kernel_text(TEXTS / "packed" / f"{name}.cu").count(right) == 1
    shim = TensorShim()
    *_, gates = fusions(shim)
    assert gates.why_not() is None
    shim.mutate = lambda _, body: body.replace(right, wrong)
    *_, gates = fusions(shim)
    assert gates.why_not() is not None


def fusions(shim: TensorShim) -> list[Fusion]:
    """Return what is computed around products, SwiGLU of more rows last."""
    products = PackedProducts(Q4, 512, "cuda")
    products.kernels = PackedKernels(shim)
    arounds = (Around(1e-5), Around(1e-5, gates=True), Around(adds=True), GATES)
    return [Fusion(products, around, mx.bfloat16, 512) for around in arounds]


def test_a_wrong_kernel_is_not_used() -> None:
    require_compiler()
    shim = TensorShim()
    model = packed_model(Q4, shim)
    shim.mutate = lambda name, body: body.replace("+ EPSILON", "+ 0.5f")
    trials = KernelTrials()
    assert use_fused_blocks(model, trials) == 0
    assert not all(trials.found.values())


def test_layers_in_training_are_mlxs_own() -> None:
    require_compiler()
    model = packed_model(Q4, TensorShim())
    assert use_fused_blocks(model)
    model.train()
    assert fused_block(model.model.layers[0], mx.zeros((1, 1, 512), mx.bfloat16)) is None
