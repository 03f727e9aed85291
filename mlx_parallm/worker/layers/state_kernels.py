"""Kernels of recurrent layers, on an NVIDIA GPU: gated delta rule, state spaces, convolutions.

mlx_lm has kernels of the delta rule and of state spaces for Metal only. Elsewhere it uses
operations that each read and write all states, for the delta rule once for every token. MLX hands
convolutions to cuDNN, which is built for wider ones and prepares itself anew for every length
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
from mlx_parallm.worker.layers.kernels import HEADERS, TEXTS

# WARP is the number of threads in a warp, and WARPS that of warps in a threadgroup.
WARP = 32
WARPS = 4
# ROWS is the number of a state's rows that one warp computes.
ROWS = 4
# MAX_COLUMNS: a warp keeps its rows of a state in registers, which hold that many columns.
MAX_COLUMNS = 256
# THREADS is the number of threads in a threadgroup of the convolution.
THREADS = 256
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
# MAX_ERROR is in parts of the largest value: 16-bit outputs are rounded to 8 bits or more.
MAX_ERROR = 0.02
#: REPORT_SHAPE has a report's sequences, tokens, heads of keys and of values, and both sizes.
REPORT_SHAPE = (2, 3, 2, 4, 128, 128)
REPORT_CHANNELS = 512
REPORT_WIDTH = 4


class _StateKernel:
    def __init__(self, language: KernelLanguage) -> None:
        """Prepare to build the kernel in ``language``: CUDA's, or a test's stand-in for it."""
        self._builder = KernelBuilder(language, TEXTS, "states")


class DeltaKernel(_StateKernel):
    """The gated delta rule; each variant is compiled once."""

    def serves(self, q: mx.array, v: mx.array, state: mx.array) -> bool:
        """True if the kernel takes arrays of these shapes and dtypes."""
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
        """Return the outputs and the state after the last token, as mlx_lm's ``gated_delta_ops``.

        Args:
            q: queries, ``[B, T, K, DK]``.
            k: keys, ``[B, T, K, DK]``.
            v: values, ``[B, T, V, DV]``; V is a multiple of K.
            g: decays, ``[B, T, V]``, or one for each column of a state, ``[B, T, V, DK]``.
            beta: learning rates of the rule, ``[B, T, V]``.
            state: the state before the first token, float32 ``[B, V, DV, DK]``.

        Returns:
            Outputs ``[B, T, V, DV]`` in the dtype of q, and the state in float32.
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
        kernel = self._builder.kernel(
            KernelSpec("delta.cu", inputs, ("y", "after"), HEADERS), constants
        )
        y, after = kernel(
            inputs=[q, k.astype(q.dtype), v, g.astype(mx.float32), beta.astype(mx.float32), state],
            output_shapes=[v.shape, state.shape],
            output_dtypes=[q.dtype, mx.float32],
            **launch_of(v.shape[0] * heads * (rows // ROWS)),
        )
        return y, after


class ScanKernel(_StateKernel):
    """One token of a selective state space (Mamba 2); each variant is compiled once."""

    def serves(self, x: mx.array, b: mx.array, state: mx.array) -> bool:
        """True if the kernel takes arrays of these shapes and dtypes."""
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
        """Return the outputs and the state after the token.

        Args:
            x: inputs, ``[B, 1, H, DH]``.
            decay: what each head's state is multiplied by, ``[B, 1, H]``.
            dt: the length of the token's time step, ``[B, 1, H]``.
            b: input vectors, ``[B, 1, G, DS]``; H is a multiple of G.
            c: output vectors, ``[B, 1, G, DS]``.
            state: the state before the token, float32 ``[B, H, DH, DS]``.

        Returns:
            Outputs ``[B, 1, H, DH]`` in the dtype of x, and the state in float32.
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
        kernel = self._builder.kernel(
            KernelSpec("scan.cu", inputs, ("y", "after"), HEADERS), constants
        )
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


class ConvolutionKernel(_StateKernel):
    """A depthwise convolution along the tokens, without padding."""

    def __call__(self, x: mx.array, weight: mx.array) -> mx.array:
        """Return the convolution of x ``[B, T, C]``, as ``[B, T - W + 1, C]``.

        ``weight`` is ``[C, W, 1]`` in the dtype of x.
        """
        batch, length, channels = x.shape
        width = weight.shape[1]
        constants: dict[str, Constant] = {"T": x.dtype, "WIDTH": width, "THREADS": THREADS}
        kernel = self._builder.kernel(
            KernelSpec("convolution.cu", ("x", "weight"), ("y",), HEADERS), constants
        )
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
    """Return how many neighbouring columns a thread loads at once: the most that divide evenly."""
    return next(size for size in (4, 2, 1) if columns % (WARP * size) == 0)


def launch_of(warps: int) -> dict[str, tuple[int, int, int]]:
    """Return the grid and threadgroup of a launch of so many warps, in whole threadgroups."""
    threads = WARPS * WARP
    return {"grid": (-(-warps // WARPS) * threads, 1, 1), "threadgroup": (threads, 1, 1)}


def delta_error(kernel: DeltaKernel, shape: tuple[int, ...], dtype: mx.Dtype, gates: int) -> float:
    """Return the largest difference from mlx_lm's operations, in parts of the largest value.

    ``shape`` is as ``REPORT_SHAPE``; ``gates`` is 1, or the number of a state's columns.
    """
    batch, tokens, k_heads, v_heads, columns, rows = shape
    keys = iter(mx.random.split(mx.random.key(0), 6))

    def normal(*sizes: int) -> mx.array:
        return mx.random.normal(sizes, key=next(keys))

    q, k = (normal(batch, tokens, k_heads, columns) * columns**-0.5 for _ in range(2))
    v = normal(batch, tokens, v_heads, rows)
    gate = normal(batch, tokens, v_heads, gates)
    inputs = [
        *(array.astype(dtype) for array in (q, k, v)),
        mx.sigmoid(gate if gates > 1 else gate[..., 0]),
        mx.sigmoid(normal(batch, tokens, v_heads)).astype(dtype),
        normal(batch, v_heads, rows, columns),
    ]
    pairs = zip(kernel(*inputs), gated_delta_ops(*inputs), strict=True)
    return max(largest_error(*pair) for pair in pairs)


def scan_error(kernel: ScanKernel, shape: tuple[int, ...], dtype: mx.Dtype) -> float:
    """Return the largest difference from mlx_lm's ``ssm_attn``, in parts of the largest value.

    ``shape`` has sequences, groups, heads, and the columns and rows of a state.
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
    expected = ssm_attn(x, a_log, b, c, skip, dt, bias, state)
    time = compute_dt(dt, bias, (0.001, 100.0))
    actual = kernel(x, mx.exp(time * -mx.exp(a_log)), time, b, c, state)
    return max(largest_error(*pair) for pair in zip(actual, expected, strict=True))


def convolution_error(kernel: ConvolutionKernel, weight: mx.array) -> float:
    """Return the largest difference from sums in float32, in parts of the largest value."""
    channels, width, _ = weight.shape
    x = mx.random.normal((2, width + 2, channels), key=mx.random.key(1)).astype(weight.dtype)
    wide = x.astype(mx.float32)
    taps = weight[..., 0].T.astype(mx.float32)
    expected = mx.stack([(wide[:, i : i + width] * taps).sum(axis=1) for i in range(3)], axis=1)
    return largest_error(kernel(x, weight), expected)


def why_not_delta(
    kernel: DeltaKernel, shape: tuple[int, ...], dtype: mx.Dtype, gates: int
) -> str | None:
    """Return why the delta rule's kernel is not to be used; None if it agrees.

    The arguments are those of ``delta_error``.
    """
    return why_off(lambda: delta_error(kernel, shape, dtype, gates), MAX_ERROR)


def why_not_scan(kernel: ScanKernel, shape: tuple[int, ...], dtype: mx.Dtype) -> str | None:
    """Return why the kernel of state spaces is not to be used; None if it agrees.

    The arguments are those of ``scan_error``.
    """
    return why_off(lambda: scan_error(kernel, shape, dtype), MAX_ERROR)


def why_not_convolution(kernel: ConvolutionKernel, weight: mx.array) -> str | None:
    """Return why the convolution's kernel is not to be used for a weight; None if it agrees."""
    if weight.dtype not in DTYPES:
        return f"weights of {weight.dtype}"
    return why_off(lambda: convolution_error(kernel, weight), MAX_ERROR)


def states_report() -> KernelReport:
    """Test the three kernels on the default device, if it has them."""
    return cuda_report(_why_not)


def _why_not(language: KernelLanguage) -> str | None:
    """Return why one of the kernels is not to be used at the report's shapes; None if all agree."""
    weight = mx.random.normal((REPORT_CHANNELS, REPORT_WIDTH, 1), key=mx.random.key(0))
    return (
        why_not_delta(DeltaKernel(language), REPORT_SHAPE, mx.bfloat16, 1)
        or why_not_scan(ScanKernel(language), (2, 2, 4, 128, 64), mx.bfloat16)
        or why_not_convolution(ConvolutionKernel(language), weight.astype(mx.bfloat16))
    )
