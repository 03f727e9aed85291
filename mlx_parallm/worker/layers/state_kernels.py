"""Kernels of recurrent layers, on an NVIDIA GPU: gated delta rule, state spaces, convolutions.

mlx_lm has kernels of the rule and of state spaces for Metal and computes both elsewhere by
operations that each read and write all states, the rule once for every token. MLX hands
convolutions to cuDNN, which is made for wider ones and prepares itself anew for every length
(``docs/decisions/019-recurrent-layers.md``).
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.ssm import compute_dt, ssm_attn

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.device.kernel_trial import cuda_report, largest_error, why_off
from mlx_parallm.worker.device.kernels import KernelReport
from mlx_parallm.worker.layers.kernels import TEXTS

WARP = 32
# Of a threadgroup of the rule, and the rows of a state that one has.
WARPS = 4
ROWS = 4
# Registers hold that many columns of a state's rows.
MAX_COLUMNS = 256
# Of a threadgroup of the convolution.
THREADS = 256
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
# Of the largest value: outputs of 16-bit numbers are rounded to 8 bits or more.
MAX_ERROR = 0.02
#: Of a report: sequences, tokens, heads of keys and of values, and their sizes.
REPORT_SHAPE = (2, 3, 2, 4, 128, 128)
REPORT_CHANNELS = 512
REPORT_WIDTH = 4


class DeltaKernel:
    """The gated delta rule in its variants, each compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """``language`` is CUDA's, or one that stands for it."""
        self._builder = KernelBuilder(language, TEXTS, "states")

    def serves(self, q: mx.array, v: mx.array, state: mx.array) -> bool:
        """Whether it is for arrays of these shapes and dtypes."""
        columns, rows = q.shape[-1], v.shape[-1]
        return (
            q.dtype in DTYPES
            and v.dtype == q.dtype
            and state.dtype == mx.float32
            and columns % WARP == 0
            and columns <= MAX_COLUMNS
            and rows % ROWS == 0
        )

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Outputs and the state after the last token, as mlx_lm's ``gated_delta_ops``.

        Args:
            q: ``[B, T, K, DK]``.
            k: likewise.
            v: ``[B, T, V, DV]``; V is a multiple of K.
            g: ``[B, T, V]``, or one for each column, ``[B, T, V, DK]``.
            beta: ``[B, T, V]``.
            state: float32 ``[B, V, DV, DK]``.

        Returns:
            ``[B, T, V, DV]`` of the dtype of q, and a state.
        """
        columns, (heads, rows) = q.shape[-1], v.shape[2:]
        constants: dict[str, Constant] = {
            "T": q.dtype,
            "K_HEADS": q.shape[2],
            "V_HEADS": heads,
            "DK": columns,
            "DV": rows,
            "VEC": vector_of(columns),
            "ROWS": ROWS,
            "WARPS": WARPS,
            "GATES": int(g.ndim == v.ndim),
        }
        inputs = ("q", "k", "v", "g", "beta", "before")
        kernel = self._builder.kernel(KernelSpec("delta", inputs, ("y", "after")), constants)
        y, after = kernel(
            inputs=[q, k.astype(q.dtype), v, g.astype(mx.float32), beta.astype(mx.float32), state],
            output_shapes=[v.shape, state.shape],
            output_dtypes=[q.dtype, mx.float32],
            **launch_of(v.shape[0] * heads * (rows // ROWS)),
        )
        return y, after


class ScanKernel:
    """One token of a selective state space (Mamba 2) in its variants, each compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """``language`` is CUDA's, or one that stands for it."""
        self._builder = KernelBuilder(language, TEXTS, "states")

    def serves(self, x: mx.array, b: mx.array, state: mx.array) -> bool:
        """Whether it is for arrays of these shapes and dtypes."""
        columns, rows = b.shape[-1], x.shape[-1]
        return (
            x.shape[1] == 1
            and x.dtype in DTYPES
            and b.dtype == x.dtype
            and state.dtype == mx.float32
            and columns % WARP == 0
            and columns <= MAX_COLUMNS
            and rows % ROWS == 0
        )

    def __call__(
        self,
        x: mx.array,
        decay: mx.array,
        dt: mx.array,
        b: mx.array,
        c: mx.array,
        state: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """What the states give, and they themselves after the token.

        Args:
            x: ``[B, 1, H, DH]``.
            decay: of each head's state, ``[B, 1, H]``.
            dt: the time that the token takes, ``[B, 1, H]``.
            b: input vectors, ``[B, 1, G, DS]``; H is a multiple of G.
            c: output vectors, likewise.
            state: float32 ``[B, H, DH, DS]``.

        Returns:
            ``[B, 1, H, DH]`` of the dtype of x, and a state.
        """
        batch, _, heads, rows = x.shape
        groups, columns = b.shape[2:]
        constants: dict[str, Constant] = {
            "T": x.dtype,
            "HEADS": heads,
            "GROUPS": groups,
            "DH": rows,
            "DS": columns,
            "VEC": vector_of(columns),
            "ROWS": ROWS,
            "WARPS": WARPS,
        }
        inputs = ("x", "decay", "dt", "b", "c", "before")
        kernel = self._builder.kernel(KernelSpec("scan", inputs, ("y", "after")), constants)
        y, after = kernel(
            inputs=[
                x,
                decay.astype(mx.float32),
                dt.astype(mx.float32),
                b,
                c.astype(b.dtype),
                state,
            ],
            output_shapes=[x.shape, state.shape],
            output_dtypes=[x.dtype, mx.float32],
            **launch_of(batch * heads * (rows // ROWS)),
        )
        return y, after


class ConvolutionKernel:
    """A convolution along the tokens, each channel for itself, without padding."""

    def __init__(self, language: KernelLanguage) -> None:
        """``language`` is CUDA's, or one that stands for it."""
        self._builder = KernelBuilder(language, TEXTS, "states")

    def __call__(self, x: mx.array, weight: mx.array) -> mx.array:
        """``[B, T - W + 1, C]`` of x ``[B, T, C]`` and a weight ``[C, W, 1]`` of its dtype."""
        batch, length, channels = x.shape
        width = weight.shape[1]
        constants: dict[str, Constant] = {"T": x.dtype, "WIDTH": width, "THREADS": THREADS}
        kernel = self._builder.kernel(KernelSpec("convolution", ("x", "weight"), ("y",)), constants)
        shape = (batch, length - width + 1, channels)
        size = shape[0] * shape[1] * shape[2]
        (y,) = kernel(
            inputs=[x, weight],
            output_shapes=[shape],
            output_dtypes=[x.dtype],
            grid=(-(-size // THREADS) * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
        )
        return y


def vector_of(columns: int) -> int:
    """How many neighbours a lane takes at once."""
    return next(size for size in (4, 2, 1) if columns % (WARP * size) == 0)


def launch_of(warps: int) -> dict[str, tuple[int, int, int]]:
    """Whole threadgroups of so many warps."""
    threads = WARPS * WARP
    return {"grid": (-(-warps // WARPS) * threads, 1, 1), "threadgroup": (threads, 1, 1)}


def delta_error(kernel: DeltaKernel, shape: tuple[int, ...], dtype: mx.Dtype, gates: int) -> float:
    """Largest difference from mlx_lm's operations, in parts of the largest value.

    ``shape`` is as ``REPORT_SHAPE``; ``gates`` are 1, or as many as there are columns.
    """
    batch, tokens, k_heads, v_heads, columns, rows = shape
    keys = iter(mx.random.split(mx.random.key(0), 6))

    def normal(*sizes: int) -> mx.array:
        return mx.random.normal(sizes, key=next(keys))

    q, k = (normal(batch, tokens, k_heads, columns) * columns**-0.5 for _ in range(2))
    v = normal(batch, tokens, v_heads, rows)
    gate = normal(batch, tokens, v_heads, gates)
    inputs = [
        *(one.astype(dtype) for one in (q, k, v)),
        mx.sigmoid(gate if gates > 1 else gate[..., 0]),
        mx.sigmoid(normal(batch, tokens, v_heads)).astype(dtype),
        normal(batch, v_heads, rows, columns),
    ]
    pairs = zip(kernel(*inputs), gated_delta_ops(*inputs), strict=True)
    return max(largest_error(found, wanted) for found, wanted in pairs)


def scan_error(kernel: ScanKernel, shape: tuple[int, ...], dtype: mx.Dtype) -> float:
    """The same for one token of a state space.

    ``shape``: sequences, groups and heads, columns and rows of a state.
    """
    batch, groups, heads, columns, rows = shape
    keys = iter(mx.random.split(mx.random.key(0), 6))

    def normal(*sizes: int) -> mx.array:
        return mx.random.normal(sizes, key=next(keys))

    x = normal(batch, 1, heads, rows).astype(dtype)
    b, c = (normal(batch, 1, groups, columns).astype(dtype) for _ in range(2))
    dt, bias = normal(batch, 1, heads).astype(dtype), mx.zeros(heads)
    a_log, skip = mx.linspace(-1, 1, heads), mx.zeros(heads, dtype)
    state = normal(batch, heads, rows, columns)
    wanted = ssm_attn(x, a_log, b, c, skip, dt, bias, state)
    time = compute_dt(dt, bias, (0.001, 100.0))
    found = kernel(x, mx.exp(time * -mx.exp(a_log)), time, b, c, state)
    return max(largest_error(*pair) for pair in zip(found, wanted, strict=True))


def convolution_error(kernel: ConvolutionKernel, weight: mx.array) -> float:
    """Largest difference from float32 sums, in parts of the largest value."""
    channels, width, _ = weight.shape
    x = mx.random.normal((2, width + 2, channels), key=mx.random.key(1)).astype(weight.dtype)
    wide = x.astype(mx.float32)
    taps = weight[..., 0].T.astype(mx.float32)
    wanted = mx.stack([(wide[:, i : i + width] * taps).sum(axis=1) for i in range(3)], axis=1)
    return largest_error(kernel(x, weight), wanted)


def why_not_delta(
    kernel: DeltaKernel, shape: tuple[int, ...], dtype: mx.Dtype, gates: int
) -> str | None:
    """Why the rule's kernel is not to be used; None if it agrees. See ``delta_error``."""
    return why_off(lambda: delta_error(kernel, shape, dtype, gates), MAX_ERROR)


def why_not_scan(kernel: ScanKernel, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
    """The same for the kernel of state spaces. See ``scan_error``."""
    return why_off(lambda: scan_error(kernel, shape, dtype), MAX_ERROR)


def why_not_convolution(kernel: ConvolutionKernel, weight: mx.array) -> str | None:
    """Why the convolution's kernel is not to be used for a weight; None if it agrees."""
    if weight.dtype not in DTYPES:
        return f"weights of {weight.dtype}"
    return why_off(lambda: convolution_error(kernel, weight), MAX_ERROR)


def states_report() -> KernelReport:
    """Test the kernels of the default device, if it has some."""
    return cuda_report(_why_not)


def _why_not(language: KernelLanguage) -> str | None:
    """Why one of them is not to be used at the shapes of a report."""
    weight = mx.random.normal((REPORT_CHANNELS, REPORT_WIDTH, 1), key=mx.random.key(0))
    return (
        why_not_delta(DeltaKernel(language), REPORT_SHAPE, mx.bfloat16, 1)
        or why_not_scan(ScanKernel(language), (2, 2, 4, 128, 64), mx.bfloat16)
        or why_not_convolution(ConvolutionKernel(language), weight.astype(mx.bfloat16))
    )
