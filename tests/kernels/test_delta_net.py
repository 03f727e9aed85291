"""The kernels of whole gated delta nets as C++: in mlx_lm's layers and in a served model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.path_choice import choose_path
from mlx_parallm.worker.layers.delta_net import (
    NetKernels,
    delta_net,
    net_error,
    use_net_kernels,
    why_not,
)
from mlx_parallm.worker.ops import at_once
from tests.builders.architectures.configs import config_of
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS, CudaShim

NAMES = ("qwen3_5", "qwen3_next")
SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


class CountedKernels(NetKernels):
    """Records the number of rows of each call."""

    def __init__(self, language: KernelLanguage) -> None:
        super().__init__(language)
        self.rows: list[int] = []

    def mix(
        self, x: mx.array, before: mx.array, weight: mx.array, k_heads: int, v_heads: int
    ) -> tuple[mx.array, mx.array]:
        self.rows.append(x.shape[0])
        return super().mix(x, before, weight, k_heads, v_heads)


def net_of(
    name: str, dtype: mx.Dtype = mx.float32, sizes: Mapping[str, int] = MappingProxyType({})
) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    args = getattr(module, "TextModelArgs", module.ModelArgs)
    kind = getattr(module, "GatedDeltaNet", None) or module.Qwen3NextGatedDeltaNet
    mx.random.seed(1)
    net = kind(args.from_dict(config_of(name) | SIZES | dict(sizes)))
    net.dt_bias = mx.random.normal(net.dt_bias.shape)
    logs = net.A_log
    net.set_dtype(dtype)
    net.A_log = logs
    net.eval()
    return net


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "width"), [(32, 4), (64, 2), (128, 3)])
def test_a_token_of_a_net_is_mlx_lms(name: str, size: int, width: int) -> None:
    require_compiler()
    shim = CudaShim()
    net = net_of(
        name,
        mx.float32,
        {
            "linear_key_head_dim": size,
            "linear_value_head_dim": size,
            "linear_conv_kernel_dim": width,
        },
    )
    for shim.order in ORDERS:
        assert net_error(NetKernels(shim), net) < 2e-5


def test_numbers_of_16_bits_are_rounded_like_them() -> None:
    require_compiler()
    assert net_error(NetKernels(CudaShim()), net_of("qwen3_5", mx.bfloat16)) < 0.02


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("far /= 2", "far /= 4"),
        ("KEY * length", "length"),
        ("i > 0", "i > 1"),
        ("*= decay", "*= 1.0f"),
        ("* rate", ""),
        ("/ (V_HEADS / K_HEADS)", "% K_HEADS"),
        ("x_strides[0]", "1"),
        ("a_strides[0]", "1"),
    ],
)
def test_a_wrong_kernel_is_not_used(right: str, wrong: str) -> None:
    require_compiler()
    shim, net = CudaShim(), net_of("qwen3_5")
    assert why_not(NetKernels(shim), net) is None
    shim.mutate = lambda _, body: body.replace(right, wrong)
    reason = why_not(NetKernels(shim), net)
    assert reason is not None
    assert "off by" in reason


@pytest.mark.parametrize(
    "sizes",
    [{"linear_value_head_dim": 64}, {f"linear_{kind}_head_dim": 48 for kind in ("key", "value")}],
)
def test_other_sizes_are_left_to_mlx_lm(sizes: dict[str, int]) -> None:
    net = net_of("qwen3_5", sizes=sizes)
    reason = why_not(NetKernels(CudaShim()), net)
    assert reason is not None
    assert "heads of" in reason
    assert use_net_kernels(net, NetKernels(CudaShim())) == 0


def test_prompts_and_fresh_states_are_left_to_mlx_lm() -> None:
    require_compiler()
    net = net_of("qwen3_5")
    x = mx.zeros((2, 1, net.hidden_size))
    cache = ArraysCache(2)
    assert delta_net(None, net, x, cache=cache) is None
    net(x, cache=cache)
    assert delta_net(None, net, x, cache=cache) is None, "it was given no kernels"
    assert use_net_kernels(net, NetKernels(CudaShim())) == 1
    assert delta_net(None, net, x, cache=ArraysCache(2)) is None
    assert delta_net(None, net, mx.zeros((2, 3, net.hidden_size)), cache=cache) is None
    assert delta_net(None, net, x, mx.ones((2, 1), mx.bool_), cache) is None
    assert delta_net(None, net, x) is None
    assert delta_net(None, net, x, cache=cache) is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_served_model_uses_them_and_is_the_same(name: str) -> None:
    require_compiler()
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = config_of(name)
    text = config.get("text_config", config)
    text |= SIZES
    mx.random.seed(2)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    kernels = CountedKernels(CudaShim())
    num_nets = sum(hasattr(module, "A_log") for module in model.modules())
    assert use_net_kernels(model, kernels) == num_nets > 0
    layouts, before = probe_layout(model), kernels.rows[:]
    vocab_size = text["vocab_size"]
    choice = at_once(choose_path)(
        model,
        layouts,
        ReferenceAttention(4),
        vocab_size=vocab_size,
        num_blocks=64,
        block_size=4,
        dtype="float32",
    )
    (attempt,) = choice.attempts
    assert attempt.path == "split (state)"
    assert attempt.difference is not None
    assert attempt.difference < 1e-4
    used = kernels.rows[len(before) :]
    # Decode rows of all sequences are one group; mlx_lm's own forwards have one row.
    assert max(used) == 4
    assert used.count(4) % num_nets == 0
