"""A whole gated delta net's decode step in two kernels, on an NVIDIA GPU.

mlx_lm's layer runs some thirty operations for a token. Each of them costs the host several
microseconds, whatever it computes (``docs/decisions/019-recurrent-layers.md``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.device.kernel_trial import KernelTrials, largest_error, why_off
from mlx_parallm.worker.layers.kernels import HEADERS, TEXTS
from mlx_parallm.worker.layers.state_kernels import (
    DTYPES,
    MAX_COLUMNS,
    MAX_ERROR,
    ROWS,
    WARP,
    WARPS,
    launch_of,
    vector_of,
)
from mlx_parallm.worker.layers.wrapped_calls import class_of

# EPSILON is that of mlx_lm's ``normalize_qk``, as its layers call it.
EPSILON = 1e-6
# CHECKED_ROWS is the number of sequences in the check against mlx_lm's layer.
CHECKED_ROWS = 3


class NetKernels:
    """The two kernels of a gated delta net; each variant is compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """Prepare to build kernels in ``language``: CUDA's, or a test's stand-in for it."""
        self._builder = KernelBuilder(language, TEXTS, "states")

    def mix(
        self, x: mx.array, before: mx.array, weight: mx.array, k_heads: int, v_heads: int
    ) -> tuple[mx.array, mx.array]:
        """Return the convolution's output and its next state.

        Args:
            x: the convolution's input, ``[B, 1, C]``.
            before: the inputs of the W - 1 tokens before this one, ``[B, W - 1, C]``.
            weight: the convolution's weight, ``[C, W, 1]``.
            k_heads: the number of query heads, which is that of key heads.
            v_heads: the number of value heads.

        Returns:
            Normalised queries and keys and the values, ``[B, 1, C]``; and the W - 1 latest inputs,
            ``[B, W - 1, C]``, which are the next token's ``before``. Both have the dtype of x.
        """
        heads, width = 2 * k_heads + v_heads, weight.shape[1]
        size = x.shape[-1] // heads
        constants: dict[str, Constant] = {
            "T": x.dtype,
            "K_HEADS": k_heads,
            "V_HEADS": v_heads,
            "D": size,
            "WIDTH": width,
            "WARPS": WARPS,
            "QUERY": 1.0 / size,
            "KEY": size**-0.5,
            "EPSILON": EPSILON / size,
        }
        spec = KernelSpec(
            "mix.cu", ("x", "before", "weight"), ("y", "after"), HEADERS, strided=True
        )
        y, after = self._builder.kernel(spec, constants)(
            inputs=[x, before, weight],
            output_shapes=[x.shape, before.shape],
            output_dtypes=[x.dtype, x.dtype],
            **launch_of(x.shape[0] * heads),
        )
        return y, after

    def step(
        self,
        mixed: mx.array,
        a: mx.array,
        b: mx.array,
        logs: mx.array,
        bias: mx.array,
        state: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Return the delta rule's outputs and the next state.

        Args:
            mixed: queries, keys and values from ``mix``, ``[B, 1, C]``.
            a: the token's part of the decay, ``[B, 1, V]``.
            b: the logit of the rule's learning rate (beta), ``[B, 1, V]``.
            logs: the logarithms of the heads' decay (``A_log``), ``[V]``.
            bias: what is added to ``a`` (``dt_bias``), ``[V]``.
            state: float32 ``[B, V, D, D]``.

        Returns:
            Outputs ``[B, 1, V, D]`` in the dtype of ``mixed``, and the state in float32.
        """
        batch, v_heads, size, _ = state.shape
        constants: dict[str, Constant] = {
            "T": mixed.dtype,
            "K_HEADS": (mixed.shape[-1] // size - v_heads) // 2,
            "V_HEADS": v_heads,
            "D": size,
            "VEC": vector_of(size),
            "ROWS": ROWS,
            "WARPS": WARPS,
        }
        inputs = ("mixed", "a", "b", "logs", "bias", "before")
        spec = KernelSpec("step.cu", inputs, ("y", "after"), HEADERS, strided=True)
        y, after = self._builder.kernel(spec, constants)(
            inputs=[mixed, a, b, logs, bias, state],
            output_shapes=[(batch, 1, v_heads, size), state.shape],
            output_dtypes=[mixed.dtype, mx.float32],
            **launch_of(batch * v_heads * (size // ROWS)),
        )
        return y, after


def qwen3_5_inputs(net: Any, x: mx.array) -> tuple[mx.array, ...]:
    """Return the convolution's input ``[B, 1, C]``, z ``[B, 1, V, D]``, b and a ``[B, 1, V]``."""
    z = net.in_proj_z(x).reshape(*x.shape[:2], net.num_v_heads, net.head_v_dim)
    return net.in_proj_qkv(x), z, net.in_proj_b(x), net.in_proj_a(x)


def qwen3_next_inputs(net: Any, x: mx.array) -> tuple[mx.array, ...]:
    """Return what ``qwen3_5_inputs`` returns, for weights that interleave q, k, v and z by head."""
    projected = net.in_proj_qkvz(x), net.in_proj_ba(x)
    q, k, v, z, b, a = net.fix_query_key_value_ordering(*projected)
    flat = [array.reshape(*x.shape[:2], -1) for array in (q, k, v)]
    return mx.concatenate(flat, axis=-1), z, b, a


Inputs = Callable[[Any, mx.array], tuple[mx.array, ...]]
#: How the inputs of mlx_lm's gated delta nets are computed, by module and class name.
NETS: MappingProxyType[tuple[str, str], Inputs] = MappingProxyType(
    {
        ("mlx_lm.models.qwen3_5", "GatedDeltaNet"): qwen3_5_inputs,
        ("mlx_lm.models.qwen3_next", "Qwen3NextGatedDeltaNet"): qwen3_next_inputs,
    }
)


def use_net_kernels(
    model: nn.Module, kernels: NetKernels, trials: KernelTrials | None = None
) -> int:
    """Give a model's gated delta nets the kernels where these agree; return how many nets use them.

    The nets use them only in forwards of this package: see ``delta_net``.
    """
    trial = (trials or KernelTrials()).of("kernels of gated delta nets are")
    served = 0
    for net in model.modules():
        if class_of(net) not in NETS:
            continue
        if trial.agree(_shape(net), partial(why_not, kernels, net)):
            # The inputs are looked up now: the class may be replaced while steps are split, and
            # its module's name is then another.
            net["_kernels"] = kernels, NETS[class_of(net)]
            served += 1
    return served


def delta_net(
    _step: object, net: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None
) -> mx.array | None:
    """Return a net's output for one token a sequence; None where the kernels do not apply.

    Args:
        _step: the forward in progress, which this layer does not need.
        net: mlx_lm's gated delta net.
        x: hidden states, ``[B, 1, hidden]``.
        mask: mlx_lm's mask of padding, which the kernels do not know.
        cache: mlx_lm's cache of the convolution's inputs and the rule's state; both are replaced.
    """
    if "_kernels" not in net or mask is not None or cache is None or x.shape[1] != 1:
        return None
    if cache[0] is None or cache[1] is None or cache.lengths is not None:
        return None
    if {x.dtype, cache[0].dtype} != {net.conv1d.weight.dtype} or cache[1].dtype != mx.float32:
        return None
    kernels, inputs = net["_kernels"]
    return _run(kernels, inputs, net, x, cache)


def _run(kernels: NetKernels, inputs: Inputs, net: Any, x: mx.array, cache: Any) -> mx.array:
    convolved, z, b, a = inputs(net, x)
    weight, heads = net.conv1d.weight, (net.num_k_heads, net.num_v_heads)
    mixed, cache[0] = kernels.mix(convolved, cache[0], weight, *heads)
    y, cache[1] = kernels.step(mixed, a, b, net.A_log, net.dt_bias, cache[1])
    return net.out_proj(net.norm(y, z).reshape(*x.shape[:2], -1))


def why_not(kernels: NetKernels, net: Any) -> str | None:
    """Return why the kernels are not to be used for a net; None if they agree with it."""
    return _why_unsupported(net) or why_off(lambda: net_error(kernels, net), MAX_ERROR)


def net_error(kernels: NetKernels, net: Any) -> float:
    """Return the largest difference from mlx_lm's layer, in parts of the largest value."""
    weight, size = net.conv1d.weight, net.head_v_dim
    dtype, keys = weight.dtype, iter(mx.random.split(mx.random.key(0), 3))
    width, channels = weight.shape[1], weight.shape[0]
    x = mx.random.normal((CHECKED_ROWS, 1, net.hidden_size), key=next(keys)).astype(dtype)
    kept = mx.random.normal((CHECKED_ROWS, width - 1, channels), key=next(keys)).astype(dtype)
    state = mx.random.normal((CHECKED_ROWS, net.num_v_heads, size, size), key=next(keys))
    caches = [ArraysCache(2) for _ in range(2)]
    for cache in caches:
        cache.cache = [kept, state]
    actual = _run(kernels, NETS[class_of(net)], net, x, caches[0])
    expected = net(x, cache=caches[1])
    pairs = [(actual, expected), *zip(caches[0].cache, caches[1].cache, strict=True)]
    return max(largest_error(*pair) for pair in pairs)


def _why_unsupported(net: Any) -> str | None:
    weight, size = net.conv1d.weight, net.head_v_dim
    if weight.dtype not in DTYPES or {net.A_log.dtype, net.dt_bias.dtype} - set(DTYPES):
        return f"weights of {weight.dtype}"
    if net.head_k_dim != size or size % WARP or size > MAX_COLUMNS:
        return f"heads of {net.head_k_dim} and {size} numbers"
    if "bias" in net.conv1d or weight.shape[1] < 2 or net.get("sharding_group") is not None:
        return "its convolution"
    return None


def _shape(net: Any) -> tuple[object, ...]:
    weight = net.conv1d.weight
    return (*weight.shape, weight.dtype, net.num_k_heads, net.num_v_heads, net.head_v_dim)
