"""Times the device's kernels while their checks run them: compilation, and a launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from typing_extensions import override

from mlx_parallm.config import KV_CACHE_DTYPES
from mlx_parallm.kernels.kernel import Kernel, KernelText
from mlx_parallm.kernels.language import CudaLanguage, KernelLanguage, MetalLanguage
from mlx_parallm.worker.attention.check import (
    BLOCK_SIZE,
    attention_error,
    miscopies,
    misread_share,
)
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.quantisation import quantisation_of
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.lora import adapter_check
from mlx_parallm.worker.lora.change_kernels import ChangeKernels
from mlx_parallm.worker.sampling import check as sampling_check
from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels

# NUM_LAUNCHES: launches after the first one; the fastest counts.
NUM_LAUNCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """A kernel of the device at the shapes of its check.

    Attributes:
        name: its text, and a checksum of its constants.
        compile_ms: the first launch, less one of the later ones.
        run_us: the fastest of some launches, which is little more than the cost of a launch.
        problem: why it could not be compiled or launched; None if it was.
    """

    name: str
    compile_ms: float = 0.0
    run_us: float = 0.0
    problem: str | None = None


class _TimedKernel(Kernel):
    """Launches a kernel; the first launch is timed, and repeated.

    A repetition changes nothing: it writes the same values to the same places.
    """

    def __init__(self, name: str, kernel: Kernel, note: Callable[[KernelTime], None]) -> None:
        self._name = name
        self._kernel = kernel
        self._note: Callable[[KernelTime], None] | None = note

    @override
    def __call__(self, *, inputs: Sequence[mx.array], **options: Any) -> list[mx.array]:
        note, self._note = self._note, None
        if note is None:
            return self._kernel(inputs=inputs, **options)
        mx.eval(list(inputs))
        try:
            outputs, first_s = self._launch(inputs, options)
        except MODEL_ERRORS as cause:
            note(KernelTime(name=self._name, problem=f"{type(cause).__name__}: {cause}"))
            raise
        run_s = min(self._launch(inputs, options)[1] for _ in range(NUM_LAUNCHES))
        compile_ms = max(0.0, first_s - run_s) * 1e3
        note(KernelTime(name=self._name, compile_ms=compile_ms, run_us=run_s * 1e6))
        return outputs

    def _launch(
        self, inputs: Sequence[mx.array], options: dict[str, Any]
    ) -> tuple[list[mx.array], float]:
        start_s = time.perf_counter()
        outputs = self._kernel(inputs=inputs, **options)
        mx.eval(outputs)
        return outputs, time.perf_counter() - start_s


class _TimedMetal(MetalLanguage):
    """Metal, whose kernels are timed."""

    def __init__(self, note: Callable[[KernelTime], None]) -> None:
        super().__init__()
        self._note = note

    @override
    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Kernel:
        return _TimedKernel(text.name, super().make(text, dtypes), self._note)


class _TimedCuda(CudaLanguage):
    """CUDA, whose kernels are timed."""

    def __init__(self, note: Callable[[KernelTime], None]) -> None:
        super().__init__()
        self._note = note

    @override
    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Kernel:
        return _TimedKernel(text.name, super().make(text, dtypes), self._note)


def time_kernels() -> tuple[KernelTime, ...]:
    """Run the checks of attention, sampling and adapters; return the times of their kernels.

    Nothing is timed on a CPU. Do it before other checks: a kernel is compiled once in a process.
    """
    times: dict[str, KernelTime] = {}

    def note(each: KernelTime) -> None:
        # Several checks may have a kernel, which the first of them compiles.
        times.setdefault(each.name, each)

    language = _timed_language(note)
    if language is not None:
        for check in _checks(language):
            try:
                check()
            except MODEL_ERRORS:
                # A kernel that fails has noted why; the others of its check are not run.
                continue
    return tuple(times.values())


def _timed_language(note: Callable[[KernelTime], None]) -> KernelLanguage | None:
    backend = backend_name()
    if backend == "cuda":
        return _TimedCuda(note)
    return _TimedMetal(note) if backend == "metal" else None


def _checks(language: KernelLanguage) -> list[Callable[[], object]]:
    backends = [
        KernelAttention(BLOCK_SIZE, language, quantisation=quantisation_of(dtype))
        for dtype in KV_CACHE_DTYPES
    ]
    vocab, sampling = sampling_check.REPORT_VOCAB, SamplingKernels(language)
    changes = ChangeKernels(language)
    return [
        *(lambda backend=backend: attention_error(backend) for backend in backends),
        *(lambda backend=backend: misread_share(backend) for backend in backends),
        *(lambda backend=backend: miscopies(backend) for backend in backends),
        lambda: sampling_check.why_not(sampling, vocab, mx.bfloat16),
        lambda: sampling_check.why_not(sampling, vocab, mx.float32),
        lambda: sampling_check.why_not_greedy(sampling, vocab, mx.bfloat16),
        lambda: sampling_check.why_not_greedy(sampling, vocab, mx.float32),
        lambda: adapter_check.why_not(changes, mx.bfloat16),
    ]
