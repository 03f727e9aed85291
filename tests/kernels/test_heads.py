"""The kernel that makes heads of products, in both languages, and the layers that use it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_parallm.kernels.kernel import kernel_text
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.device.kernel_trial import KernelTrials
from mlx_parallm.worker.generation.paged_cache import PackedStep, PagedLayerCache
from mlx_parallm.worker.generation.seam import ModelSeams
from mlx_parallm.worker.layers.attention_heads import settings_of, use_head_kernels
from mlx_parallm.worker.layers.block_kernels import BlockKernels, use_block_kernels
from mlx_parallm.worker.layers.row_layers import Columns, use_row_layers
from mlx_parallm.worker.layers.wrapped_calls import WrappedCalls
from tests.builders.architectures.configs import config_of
from tests.builders.random_models import stock_model
from tests.kernels.heads_trial import HeadCase, heads_are_right
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import CudaShim, Shim

pytestmark = pytest.mark.slow

CASES = (
    HeadCase(),
    HeadCase(dim=128, heads=3, kv_heads=1, dtype=mx.bfloat16),
    HeadCase(dim=256, heads=1, kv_heads=1, dtype=mx.float16),
    HeadCase(has_norms=False, is_merged=False),
    HeadCase(has_norms=False, has_frequencies=True),
)
#: ``MISTAKES``: a part of the text, and a mistake in its place.
MISTAKES = {
    "another head's key": ("FIRST_KEY + kv_head * D", "FIRST_KEY + head * D"),
    "the other norm's weight": ("is_key ? key_weight[at]", "is_key ? query_weight[at]"),
    "a sum instead of a mean": ("sum / D", "sum"),
    "no epsilon": ("+ EPSILON", "+ 0.5f"),
    "another row's position": ("positions[row]", "positions[0]"),
    "rotated backwards": ("high[i] * sine[i]", "-high[i] * sine[i]"),
    "padding is written": ("else if (slot >= 0)", "else"),
    "values of another row": ("(Place)row * values_shape[2]", "(Place)0 * values_shape[2]"),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_those_of_mlx(shim: Shim, case: HeadCase) -> None:
    assert heads_are_right(shim, case)


@pytest.mark.parametrize(("at_once", "most"), [(1, 3), (1, 4), (1, 8), (1, 64), (10, 8), (16, 8)])
def test_a_warp_may_make_several_heads(
    shim: Shim, monkeypatch: pytest.MonkeyPatch, at_once: int, most: int
) -> None:
    monkeypatch.setattr("mlx_parallm.worker.attention.kernel_heads.AT_ONCE", at_once)
    monkeypatch.setattr("mlx_parallm.worker.attention.kernel_heads.MOST_HEADS", most)
    assert heads_are_right(shim, HeadCase())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(shim: Shim, mistake: str) -> None:
    right, wrong = MISTAKES[mistake]
    assert right in kernel_text(TEXTS / "heads.metal")
    shim.mutate = lambda name, body: body.replace(right, wrong) if "_heads_" in name else body
    try:
        is_right = heads_are_right(shim, HeadCase())
    except AssertionError:
        # Something was written where nothing may be.
        is_right = False
    assert not is_right


class CountedKernels(BlockKernels):
    """Counts the calls of each kernel."""

    def __init__(self, language: KernelLanguage) -> None:
        super().__init__(language)
        self.counts: Counter[str] = Counter()

    def add_norm(
        self, x: mx.array, change: mx.array, weight: mx.array, epsilon: float
    ) -> tuple[mx.array, mx.array]:
        self.counts["add_norm"] += 1
        return super().add_norm(x, change, weight, epsilon)

    def gate(self, gates: Columns, numbers: Columns, size: int) -> mx.array:
        self.counts["gate"] += 1
        return super().gate(gates, numbers, size)


def model_of(name: str, dtype: mx.Dtype = mx.bfloat16) -> Any:
    """Return a tiny model, with heads that the kernel can make."""
    config = config_of(name) | {"head_dim": 64}
    if name == "qwen2":
        config |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = stock_model(config)
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def logits_of(model: Any, backend: KernelAttention, dtype: mx.Dtype = mx.bfloat16) -> np.ndarray:
    """Return the logits of four sequences' second tokens in a packed forward."""
    attention = model.model.layers[0].self_attn
    shape = LayerShape(num_kv_heads=attention.n_kv_heads, key_dim=64, value_dim=64, dtype=dtype)
    pools: list[LayerPool] = [backend.new_pool(shape, 4) for _ in model.model.layers]
    seams = ModelSeams(model)
    logits = mx.zeros(0)
    # As many rows as row layers take.
    for start, tokens in ((0, [3, 5, 7, 1]), (1, [9, 2, 4, 6])):
        rows = [
            ScheduledSequence(seq_id=i, slot=i, start=start, token_ids=(1,), block_table=(3 - i,))
            for i in range(4)
        ]
        step = PackedStep.of(backend, rows)
        with seams.during(step):
            caches = [PagedLayerCache(pool, None, step) for pool in pools]
            logits = model(mx.array(tokens)[:, None], cache=caches)
    return np.array(logits.astype(mx.float32))


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "qwen3_moe"])
def test_layers_whose_heads_one_kernel_makes_compute_the_same(name: str) -> None:
    require_compiler()
    # On a CPU, experts work in float32 only.
    dtype = mx.float32 if name == "qwen3_moe" else mx.bfloat16
    model, shim, made = model_of(name, dtype), CudaShim(), list[str]()
    shim.mutate = lambda kernel, body: made.append(kernel) or body
    wanted = logits_of(model, KernelAttention(16, shim), dtype)
    use_row_layers(model, None)
    assert use_head_kernels(model, shim) == len(model.model.layers)
    kernels, layers = CountedKernels(shim), len(model.model.layers)
    # On a CPU, experts work in float32 only, which the kernels of blocks do not take.
    assert use_block_kernels(model, kernels) == (0 if name == "qwen3_moe" else 2 * layers)
    made.clear()
    kernels.counts.clear()
    actual = logits_of(model, KernelAttention(16, shim), dtype)
    assert any(kernel.startswith("paged_heads_") for kernel in made)
    # There are two forwards, and the first layer's input is no sum.
    norms = 2 * (2 * layers - 1)
    counts = {} if name == "qwen3_moe" else {"add_norm": norms, "gate": 2 * layers}
    assert kernels.counts == counts
    assert not any(kernel.startswith("paged_write_") for kernel in made)
    assert np.abs(actual - wanted).max() <= 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("bits", [None, 2, 3, 4, 5, 6, 8])
def test_layers_of_packed_weights_have_the_kernel(bits: int | None) -> None:
    require_compiler()
    model, shim = model_of("qwen3"), CudaShim()
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    trials = KernelTrials()
    assert use_head_kernels(model, shim, trials) == len(model.model.layers)
    assert len(trials.found) == 1


def test_each_packing_of_products_has_a_trial() -> None:
    require_compiler()
    model, shim, trials = model_of("qwen3"), CudaShim(), KernelTrials()
    first, *others = model.model.layers
    nn.quantize(first, group_size=32, bits=4)
    for layer in others:
        nn.quantize(layer, group_size=32, bits=8)
    assert use_head_kernels(model, shim, trials) == len(model.model.layers)
    assert len(trials.found) == 2


@pytest.mark.parametrize("scales", [mx.float16, mx.float32], ids=str)
def test_products_of_another_dtype_than_the_pool_are_left_to_mlx(scales: mx.Dtype) -> None:
    """MLX's product of bfloat16 rows and a weight with such scales is float32."""
    require_compiler()
    model, shim = model_of("qwen3"), CudaShim()
    attention = model.model.layers[0].self_attn
    nn.quantize(attention, group_size=32, bits=4)
    assert use_head_kernels(model, shim) == len(model.model.layers)
    for name in ("scales", "biases"):
        attention.q_proj[name] = attention.q_proj[name].astype(scales)
    actual = logits_of(model, KernelAttention(16, shim))
    del attention["_makes_heads"]
    assert np.array_equal(actual, logits_of(model, KernelAttention(16, shim)))


def test_wrapped_layers_are_called() -> None:
    """Adapters wrap the calls of layers, whose products are then not their outputs."""
    require_compiler()
    model, shim = model_of("qwen3"), CudaShim()
    use_row_layers(model, None)
    layers = [layer for block in model.model.layers for layer in adapted_layers(block)]

    def wrapped(original: Any) -> dict[str, Any]:
        return {"__call__": lambda self, x: 1.5 * original.__call__(self, x)}

    with WrappedCalls(layers, wrapped):
        wanted = logits_of(model, KernelAttention(16, shim))
    plain = logits_of(model, KernelAttention(16, shim))
    assert use_head_kernels(model, shim)
    assert use_block_kernels(model, BlockKernels(shim))
    with WrappedCalls(layers, wrapped):
        actual = logits_of(model, KernelAttention(16, shim))
    limit = 0.02 * np.abs(wanted).max()
    assert np.abs(actual - wanted).max() <= limit
    assert np.abs(plain - wanted).max() > limit


def adapted_layers(block: Any) -> list[Any]:
    """Return some layers of a block that adapters change."""
    return [block.self_attn.q_proj, block.self_attn.v_proj, block.mlp.up_proj]


def test_a_quantised_pool_takes_the_layers_own_operations() -> None:
    require_compiler()
    model, shim, made = model_of("qwen3"), CudaShim(), list[str]()
    assert use_head_kernels(model, shim)
    shim.mutate = lambda kernel, body: made.append(kernel) or body
    logits_of(model, KernelAttention(16, shim, quantisation=KVQuantisation(bits=8)))
    assert not any(kernel.startswith("paged_heads_") for kernel in made)


def test_a_wrong_kernel_is_not_used() -> None:
    require_compiler()
    model, shim = model_of("qwen3"), CudaShim()
    shim.mutate = lambda _, body: body.replace("positions[row]", "positions[0]")
    trials = KernelTrials()
    assert use_head_kernels(model, shim, trials) == 0
    assert list(trials.found.values()) == [False]


def test_other_rotations_are_left_to_mlx() -> None:
    layer = model_of("qwen3").model.layers[0].self_attn
    assert settings_of(layer) is not None
    layer.rope.traditional = True
    assert settings_of(layer) is None
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    layer.rope = Llama3RoPE(64, scaling_config=scaling)
    settings = settings_of(layer)
    assert settings is not None
    assert settings.base is None
    layer.rope = Llama3RoPE(32, scaling_config=scaling)
    assert settings_of(layer) is None
