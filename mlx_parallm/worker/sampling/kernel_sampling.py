"""Sampling and log-probabilities by this project's kernels, alike in CUDA and Metal.

The algorithm is in ``docs/decisions/011-sampling-kernels.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import mlx.core as mx

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.sampling.kernels import TEXTS
from mlx_parallm.worker.sampling.logprobs import TargetLogprobs

# THREADS of a threadgroup. Each has 64 bytes of threadgroup memory, of which Metal has 32 KiB.
THREADS = {"cuda": 512, "metal": 256}
LOAD_BYTES = 16
# MAX_TOP: each reported token costs another pass over the logits of the thread that had the last.
MAX_TOP = 32
# MAX_VOCAB: counts are float32, which is exact up to 2**24.
MIN_VOCAB, MAX_VOCAB = MAX_TOP, 1 << 24
# UNUSED_BITS: mantissa bits of float32 that are always 0 in logits of 16 bits.
UNUSED_BITS = {mx.float32: 0, mx.float16: 13, mx.bfloat16: 16}

# SETTINGS: what ``draw`` takes into account besides masks, biases and penalties.
SETTINGS = frozenset({"temperature", "top_k", "top_p", "min_p"})

# Dtypes of the kernels' arguments, except the logits.
_DTYPES = {
    **dict.fromkeys(("settings", "floors", "targets", "top_values"), mx.float32),
    **dict.fromkeys(("keys", "tokens", "target_ids", "top_ids"), mx.uint32),
    "wanted": mx.int32,
}

_DRAW = KernelSpec("draw.metal", ("logits", "settings", "keys"), ("tokens", "floors"))
_GREEDY = KernelSpec("greedy.metal", ("logits",), ("tokens",))
_LOGPROBS = KernelSpec(
    "logprobs.metal",
    ("logits", "tokens", "wanted"),
    ("target_ids", "targets", "top_ids", "top_values"),
)


class SamplingKernels:
    """The kernels of one device, each variant compiled once."""

    def __init__(self, language: KernelLanguage, *, threads: int | None = None) -> None:
        """``threads`` of a threadgroup is a multiple of 32; None: the device's default."""
        self._builder = KernelBuilder(language, TEXTS, "sampling", _argument_dtype)
        self._threads = threads or THREADS[language.name]
        self._trusted: set[tuple[int, mx.Dtype]] = set()
        self._trusted_greedy: set[tuple[int, mx.Dtype]] = set()
        self._made: dict[tuple[str, int, mx.Dtype], Kernel] = {}
        self.name = language.name

    @property
    def has_greedy(self) -> bool:
        """True if ``greedy`` is for this device.

        MLX's ``argmax`` reads 0.6 TB/s on an NVIDIA H200; on a Mac neither was measured.
        """
        return self.name == "cuda"

    def begin(self, vocab: int, dtypes: Iterable[mx.Dtype]) -> None:
        """Start to compile the kernels for such logits, in the background if possible."""
        specs = (_DRAW, _LOGPROBS, *((_GREEDY,) if self.has_greedy else ()))
        for dtype in dtypes:
            if why_unsupported(vocab, dtype) is None:
                for spec in specs:
                    self._kernel(spec, vocab, dtype)

    def trust(self, vocab: int, dtype: mx.Dtype) -> None:
        """Use ``draw`` and ``logprobs`` for such logits from now on, because a check passed."""
        self._trusted.add((vocab, dtype))

    def trust_greedy(self, vocab: int, dtype: mx.Dtype) -> None:
        """Use ``greedy`` for such logits from now on, because its check passed."""
        self._trusted_greedy.add((vocab, dtype))

    def serve(self, logits: mx.array, settings: frozenset[str] = frozenset()) -> bool:
        """True if a check passed for such logits, and the kernels know all of these settings.

        Args:
            logits: as ``draw`` or ``logprobs`` takes them.
            settings: the names of the fields that change what tokens are drawn from.
        """
        return settings <= SETTINGS and (logits.shape[-1], logits.dtype) in self._trusted

    def serve_greedy(self, logits: mx.array) -> bool:
        """True if ``greedy`` is for this device, and its check passed for such logits."""
        return self.has_greedy and (logits.shape[-1], logits.dtype) in self._trusted_greedy

    def greedy(self, logits: mx.array) -> mx.array:
        """Return the token with the largest logit of each row, the lowest of equals.

        NaN is the largest, as in ``mx.argmax``.

        Args:
            logits: float32, float16 or bfloat16 ``[rows, vocab]``.

        Returns:
            uint32 ``[rows]``.
        """
        rows = logits.shape[0]
        return self._kernel(_GREEDY, logits.shape[-1], logits.dtype)(
            inputs=[logits],
            output_shapes=[(rows,)],
            output_dtypes=[mx.uint32],
            grid=(rows * self._threads, 1, 1),
            threadgroup=(self._threads, 1, 1),
        )[0]

    def draw(
        self, logits: mx.array, settings: mx.array, keys: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Draw a token per row: uint32 ``[rows]``, and the smallest scaled logit kept, float32.

        A row with NaN has the first of these, whatever its settings.

        Args:
            logits: float32, float16 or bfloat16 ``[rows, vocab]``.
            settings: float32 ``[rows, 4]``: temperature (0: greedy), top-k (0: all), top-p and the
                logarithm of min-p.
            keys: uint32 ``[rows, 2]``, see ``row_settings.random_keys``.
        """
        rows = logits.shape[0]
        tokens, floors = self._kernel(_DRAW, logits.shape[-1], logits.dtype)(
            inputs=[logits, settings, keys],
            output_shapes=[(rows,), (rows,)],
            output_dtypes=[mx.uint32, mx.float32],
            grid=(rows * self._threads, 1, 1),
            threadgroup=(self._threads, 1, 1),
        )
        return tokens, floors

    def logprobs(
        self, logits: mx.array, tokens: mx.array, wanted: mx.array, top: int
    ) -> TargetLogprobs:
        """Return log-probabilities of targets and likeliest tokens, like ``target_logprobs``.

        Args:
            logits: float32, float16 or bfloat16 ``[rows, vocab]``.
            tokens: the targets, uint32 ``[rows]``.
            wanted: int32 ``[n, 2]``: the index of a row, and ``top``.
            top: how many of the likeliest tokens to return, up to ``MAX_TOP``.
        """
        count = wanted.shape[0]
        target_ids, targets, top_ids, top_values = self._kernel(
            _LOGPROBS, logits.shape[-1], logits.dtype
        )(
            inputs=[logits, tokens, wanted],
            output_shapes=[(count,), (count,), (count, max(top, 1)), (count, max(top, 1))],
            output_dtypes=[mx.uint32, mx.float32, mx.uint32, mx.float32],
            grid=(count * self._threads, 1, 1),
            threadgroup=(self._threads, 1, 1),
        )
        if top == 0:
            return TargetLogprobs(target_ids, targets, None, None)
        return TargetLogprobs(target_ids, targets, top_ids, top_values)

    def _kernel(self, spec: KernelSpec, vocab: int, dtype: mx.Dtype) -> Kernel:
        key = (spec.text, vocab, dtype)
        kernel = self._made.get(key)
        if kernel is None:
            constants: dict[str, Constant] = {
                "T": dtype,
                "V": vocab,
                "VEC": _vector(vocab, dtype),
                "DROP": UNUSED_BITS[dtype],
                "THREADS": self._threads,
            }
            kernel = self._made[key] = self._builder.kernel(spec, constants)
        return kernel


def why_unsupported(vocab: int, dtype: mx.Dtype) -> str | None:
    """Return why the kernels do not take such logits; None if they do."""
    if dtype not in UNUSED_BITS:
        return f"logits of {dtype}"
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        return f"a vocabulary of {vocab}"
    return None


def _argument_dtype(name: str, constants: Mapping[str, Constant]) -> mx.Dtype | None:
    dtype = _DTYPES.get(name, constants["T"])
    return dtype if isinstance(dtype, mx.Dtype) else None


def _vector(vocab: int, dtype: mx.Dtype) -> int:
    """Return how many logits a thread loads at once.

    The number divides each half of a row, because the halves are paired.
    """
    return 1 if vocab % 2 else math.gcd(LOAD_BYTES // dtype.size, vocab // 2)
