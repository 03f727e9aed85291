"""Kernels of a transformer block between its products: residual with norm, and SwiGLU.

MLX runs two operations for each, and SwiGLU over columns of one product reads them slowly
(``docs/decisions/053-fewer-kernels-a-layer.md``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.device.kernel_trial import KernelTrials, largest_error, why_off
from mlx_parallm.worker.layers.kernels import HEADERS, TEXTS
from mlx_parallm.worker.layers.row_layers import Columns, called_part
from mlx_parallm.worker.layers.wrapped_calls import class_of

# VECTOR: neighbouring numbers that a thread takes, 16 bytes in 16-bit types.
VECTOR = 8
WARP = 32
# NORM_WARPS and GATE_WARPS of a threadgroup.
NORM_WARPS, GATE_WARPS = 8, 4
# MAX_SIZE: a thread keeps its numbers of a row in registers.
MAX_SIZE = NORM_WARPS * WARP * VECTOR * 8
DTYPES = (mx.bfloat16, mx.float16)
# MAX_ERROR is in parts of the largest value: a rounding or two of 16-bit numbers.
MAX_ERROR = 0.01
#: ``Layer`` computes the output of a layer of a block.
Layer = Callable[[mx.array], mx.array]
# ROWS of a trial.
ROWS = 3
_MODULES = ("llama", "qwen2", "qwen3", "qwen3_moe")
#: ``BLOCKS``: mlx_lm's blocks of this form, by module and class name.
BLOCKS = frozenset(
    (f"mlx_lm.models.{name}", kind)
    for name in _MODULES
    for kind in ("TransformerBlock", "Qwen3MoeDecoderLayer")
    if (kind == "TransformerBlock") == (name != "qwen3_moe")
)
#: ``MLPS``: mlx_lm's MLPs of this form, by module and class name.
MLPS = frozenset((f"mlx_lm.models.{name}", "MLP") for name in _MODULES)


class BlockKernels:
    """The kernels of blocks; each variant is compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """Prepare to build kernels in ``language``: CUDA's, or a test's stand-in for it."""
        self._builder = KernelBuilder(language, TEXTS, "blocks")

    def add_norm(
        self, x: mx.array, change: mx.array, weight: mx.array, epsilon: float
    ) -> tuple[mx.array, mx.array]:
        """Return ``x + change`` and its RMSNorm; both arguments are ``[T, 1, N]``.

        The change may be parts in float32, ``[S, T, 1, N]``, that are still to be added.
        """
        spec = KernelSpec("add_norm.cu", ("x", "change", "weight"), ("sum", "normalised"), HEADERS)
        constants = {"NORM": 1, "EPSILON": float(epsilon)}
        total, normalised = self._added(spec, constants, x, [change, weight])
        return total, normalised

    def add_parts(self, x: mx.array, parts: mx.array) -> mx.array:
        """Return ``x``, ``[T, 1, N]``, plus the sum of parts in float32, ``[S, T, 1, N]``."""
        spec = KernelSpec("add_norm.cu", ("x", "change"), ("sum",), HEADERS)
        return self._added(spec, {"NORM": 0}, x, [parts])[0]

    def _added(
        self, spec: KernelSpec, constants: dict[str, Constant], x: mx.array, others: list[mx.array]
    ) -> list[mx.array]:
        kernel = self._builder.kernel(
            spec,
            {
                "T": x.dtype,
                "SIZE": x.shape[-1],
                "VEC": VECTOR,
                "WARPS": NORM_WARPS,
                "IN_PARTS": int(others[0].ndim > x.ndim),
                **constants,
            },
        )
        threads = NORM_WARPS * WARP
        return kernel(
            inputs=[x, *others],
            output_shapes=[x.shape for _ in spec.outputs],
            output_dtypes=[x.dtype for _ in spec.outputs],
            grid=(x.shape[0] * threads, 1, 1),
            threadgroup=(threads, 1, 1),
        )

    def gate(self, gates: Columns, numbers: Columns, size: int) -> mx.array:
        """Return ``silu(gates) * numbers``, ``[T, 1, size]``."""
        matrix = gates.matrix
        constants: dict[str, Constant] = {
            "T": matrix.dtype,
            "SIZE": size,
            "VEC": VECTOR,
            "WARPS": GATE_WARPS,
            "FIRST_GATE": gates.first,
            "FIRST_NUMBER": numbers.first,
        }
        spec = KernelSpec("gate.cu", ("gates", "numbers"), ("products",), HEADERS)
        threads = GATE_WARPS * WARP
        groups = -(-matrix.shape[0] * (size // VECTOR) // threads)
        return self._builder.kernel(spec, constants)(
            inputs=[matrix, numbers.matrix],
            output_shapes=[(matrix.shape[0], 1, size)],
            output_dtypes=[matrix.dtype],
            grid=(groups * threads, 1, 1),
            threadgroup=(threads, 1, 1),
        )[0]


def use_block_kernels(
    model: nn.Module, kernels: BlockKernels, trials: KernelTrials | None = None
) -> int:
    """Mark a model's blocks and MLPs for which the kernels are right; return how many are.

    They use them only in packed forwards of this package, see ``attention_overrides``.
    """
    all_trials = trials or KernelTrials()
    norms, gates = (
        all_trials.of("the kernel of residuals is"),
        all_trials.of("the kernel of SwiGLU is"),
    )
    marked = 0
    for module in model.modules():
        kind = class_of(module)
        if kind in BLOCKS:
            is_right = all(
                norms.agree(
                    (norm.weight.size, norm.eps, norm.weight.dtype),
                    partial(why_no_norm, kernels, norm),
                )
                for norm in (module.input_layernorm, module.post_attention_layernorm)
            )
        elif kind in MLPS:
            projection = module.gate_proj
            dtype = projection.get("scales", projection.weight).dtype
            shape = projection.weight.shape, projection.weight.dtype, dtype
            is_right = gates.agree(shape, partial(why_no_gate, kernels, module))
        else:
            continue
        if is_right:
            module["_kernels"] = kernels
            marked += 1
    return marked


@dataclass(frozen=True, slots=True)
class Residual:
    """The last sum of a block, lazy; the next block may compute it with its norm.

    Attributes:
        hidden: hidden states, ``[T, 1, N]``.
        change: what is added to them, or parts of it in float32, ``[S, T, 1, N]``.
        total: the sum.
    """

    hidden: mx.array
    change: mx.array
    total: mx.array

    @classmethod
    def of(cls, kernels: BlockKernels, hidden: mx.array, change: mx.array) -> Residual:
        """Return the sum of two arrays."""
        are_parts = change.ndim > hidden.ndim
        total = kernels.add_parts(hidden, change) if are_parts else hidden + change
        return cls(hidden, change, total)


def run_block(
    block: Any, x: mx.array, attention: Layer, mlp: Layer, before: Residual | None = None
) -> Residual:
    """Return the output of a marked block of mlx_lm.

    Args:
        block: the block.
        x: its hidden states, ``[T, 1, N]``.
        attention: computes the block's attention of normalised rows, or parts of it.
        mlp: computes the block's MLP of normalised rows, or parts of it.
        before: the output of the block before, if x is its total.
    """
    kernels: BlockKernels = block["_kernels"]
    if before is None:
        normalised = block.input_layernorm(x)
    else:
        x, normalised = _add_norm(kernels, before, block.input_layernorm)
    residual = Residual.of(kernels, x, attention(normalised))
    hidden, normalised = _add_norm(kernels, residual, block.post_attention_layernorm)
    return Residual.of(kernels, hidden, mlp(normalised))


def _add_norm(kernels: BlockKernels, residual: Residual, norm: Any) -> tuple[mx.array, mx.array]:
    """Return a residual's total and the norm of it."""
    hidden, change = residual.hidden, residual.change
    are_parts = change.ndim > hidden.ndim
    if norm.weight.dtype == hidden.dtype and (are_parts or change.dtype == hidden.dtype):
        return kernels.add_norm(hidden, change, norm.weight, norm.eps)
    # The kernel reads all of them as numbers of one type.
    return residual.total, norm(residual.total)


def run_mlp(mlp: Any, x: mx.array) -> mx.array:
    """Return the output of a marked MLP of mlx_lm for rows, ``[T, 1, hidden]``."""
    return mlp.down_proj(gated(mlp, x))


def gated(mlp: Any, x: mx.array) -> mx.array:
    """Return what the last layer of a marked MLP multiplies, for rows, ``[T, 1, hidden]``."""
    kernels: BlockKernels = mlp["_kernels"]
    gates, numbers = called_part(mlp.gate_proj, x), called_part(mlp.up_proj, x)
    if gates.output.dtype not in DTYPES or gates.output.dtype != numbers.output.dtype:
        # The kernel reads both as numbers of one type, that of a trial.
        return swiglu(gates.output, numbers.output)
    return kernels.gate(gates.columns, numbers.columns, gates.output.shape[-1])


def why_no_norm(kernels: BlockKernels, norm: Any) -> str | None:
    """Return why the kernel is not to be used with a norm; None if it agrees with MLX."""
    size, dtype = norm.weight.size, norm.weight.dtype
    if type(norm) is not nn.RMSNorm or dtype not in DTYPES:
        return f"{type(norm).__name__} of {dtype}"
    if size % VECTOR or size > MAX_SIZE:
        return f"rows of {size} numbers"
    return why_off(lambda: norm_error(kernels, norm), MAX_ERROR)


def norm_error(kernels: BlockKernels, norm: Any) -> float:
    """Return the largest difference from MLX's operations, in parts of the largest value."""
    size, dtype = norm.weight.size, norm.weight.dtype
    x, change = (
        mx.random.normal((ROWS, 1, size), key=key).astype(dtype)
        for key in mx.random.split(mx.random.key(0))
    )
    total, normalised = x + change, norm(x + change)
    # A half of a 16-bit number is one too, if it is no subnormal.
    parts = mx.stack([change, change]).astype(mx.float32) / 2
    actual = [
        *kernels.add_norm(x, change, norm.weight, norm.eps),
        *kernels.add_norm(x, parts, norm.weight, norm.eps),
        kernels.add_parts(x, parts),
    ]
    return max(map(largest_error, actual, [total, normalised, total, normalised, total]))


def why_no_gate(kernels: BlockKernels, mlp: Any) -> str | None:
    """Return why the kernel is not to be used in an MLP; None if it agrees with MLX."""
    projection = mlp.gate_proj
    width, dtype = projection.weight.shape[0], projection.get("scales", projection.weight).dtype
    if width % VECTOR:
        return f"{width} columns"
    if dtype == mx.float32:
        return f"rows of {dtype}"
    return why_off(lambda: gate_error(kernels, width, dtype), MAX_ERROR)


def gate_error(kernels: BlockKernels, width: int, dtype: mx.Dtype) -> float:
    """Return the largest difference from MLX's operations, in parts of the largest value."""
    kind = dtype if dtype in DTYPES else mx.bfloat16
    both = (4 * mx.random.normal((ROWS, 1, 2 * width), key=mx.random.key(0))).astype(kind)
    actual = kernels.gate(Columns(both, 0), Columns(both, width), width)
    return largest_error(actual, swiglu(*mx.split(both, 2, axis=-1)))
