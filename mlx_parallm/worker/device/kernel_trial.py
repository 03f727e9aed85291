"""Trials of kernels against the operations that they replace, on the device they will run on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import cast

import mlx.core as mx

from mlx_parallm.kernels.language import CudaLanguage, KernelLanguage
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.kernels import KernelReport
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.device.ranks import Ranks, agreed

logger = logging.getLogger(__name__)


class ShapeTrials:
    """Tries a kernel once per shape, and logs why it is not used."""

    def __init__(
        self, what: str, verdicts: dict[str, bool] | None = None, ranks: Ranks | None = None
    ) -> None:
        """Prepare.

        Args:
            what: the kernel with its verb: "the kernel of experts is".
            verdicts: those of earlier trials, by kernel and shape; new ones are added.
            ranks: the processes that must all find a kernel right; None if there is this one alone.
        """
        self._ranks = ranks
        self._what = what
        self._agrees: dict[Hashable, bool] = {}
        self._verdicts = {} if verdicts is None else verdicts

    def agree(self, shape: Hashable, why_not: Callable[[], str | None]) -> bool:
        """True if the kernel is to be used; ``why_not`` runs for the first of a shape."""
        if shape not in self._agrees:
            name = f"{self._what} used for {shape!r}"
            if name not in self._verdicts:
                reason = why_not()
                self._verdicts[name] = agreed(self._ranks, reason is None)
                if reason is not None:
                    logger.info("%s not used for %s: %s", self._what, shape, reason)
            self._agrees[shape] = self._verdicts[name]
        return self._agrees[shape]


class KernelTrials:
    """The trials of one model's layers.

    Attributes:
        found: whether a kernel is used, by kernel and shape. A shape that comes up first while the
            model runs is tried then: its verdict depends on the device alone.
    """

    def __init__(
        self, verdicts: Mapping[str, bool] | None = None, ranks: Ranks | None = None
    ) -> None:
        """``verdicts`` are of another worker's load; their kernels are not tried again.

        ``ranks`` must all try the same kernels; one is used if all of them find it right.
        """
        self.found = dict(verdicts or {})
        self._ranks = ranks

    def of(self, what: str) -> ShapeTrials:
        """Return the trials of one kernel; see ``ShapeTrials``."""
        return ShapeTrials(what, self.found, self._ranks)


def why_off(error: Callable[[], float], limit: float) -> str | None:
    """Return why a kernel is not to be used; None if its error is small.

    ``error`` runs the kernel and returns the error in parts of the largest value.
    """
    try:
        part = error()
    except MODEL_ERRORS as cause:
        return f"{type(cause).__name__}: {cause}"
    return None if part <= limit else f"off by {part:.2g} of the largest value"


def largest_error(actual: mx.array, wanted: mx.array) -> float:
    """Return the largest difference, in parts of the largest value."""
    actual, wanted = actual.astype(mx.float32), wanted.astype(mx.float32)
    error = mx.abs(actual - wanted).max() / mx.abs(wanted).max()
    # NaN counts as an infinite error.
    return float("inf") if mx.isnan(error).item() else cast("float", error.item())


def cuda_report(why_not: Callable[[KernelLanguage], str | None]) -> KernelReport:
    """Test a kernel that is for CUDA only, if that is the default device."""
    if backend_name() != "cuda":
        return KernelReport(backend="stock")
    reason = why_not(CudaLanguage())
    return KernelReport(backend="stock" if reason else "cuda", rejected=reason)
