"""Whether a kernel agrees with what it stands for, on the device that it will run on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import cast

import mlx.core as mx

from mlx_parallm.kernels.language import CudaLanguage, KernelLanguage
from mlx_parallm.worker.device.kernels import KernelReport
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.model_errors import MODEL_ERRORS

logger = logging.getLogger(__name__)


class ShapeTrials:
    """Tries what there is for a shape once, and logs why it is not used."""

    def __init__(self, what: str, found: dict[str, bool] | None = None) -> None:
        """Prepare.

        Args:
            what: is tried, with its verb: "the kernel of experts is".
            found: what was found before, which is added to.
        """
        self._what = what
        self._agrees: dict[Hashable, bool] = {}
        self._found = {} if found is None else found

    def agree(self, shape: Hashable, why_not: Callable[[], str | None]) -> bool:
        """Whether it is to be used; ``why_not`` is asked for the first of a shape."""
        if shape not in self._agrees:
            name = f"{self._what} used for {shape!r}"
            if name not in self._found:
                reason = why_not()
                self._found[name] = reason is None
                if reason is not None:
                    logger.info("%s not used for %s: %s", self._what, shape, reason)
            self._agrees[shape] = self._found[name]
        return self._agrees[shape]


class KernelTrials:
    """The trials of one model's layers.

    Attributes:
        found: whether a kernel is used, by kernel and shape. A shape that comes up first while the
            model runs is tried then: what comes of it depends on the device alone.
    """

    def __init__(self, found: Mapping[str, bool] | None = None) -> None:
        """``found``: of another worker's load; what it has is not tried again."""
        self.found = dict(found or {})

    def of(self, what: str) -> ShapeTrials:
        """Return the trials of one kernel; see ``ShapeTrials``."""
        return ShapeTrials(what, self.found)


def why_off(error: Callable[[], float], limit: float) -> str | None:
    """Why a kernel is not to be used; None if its error, in parts of the largest value, is small.

    ``error`` runs the kernel.
    """
    try:
        found = error()
    except MODEL_ERRORS as cause:
        return f"{type(cause).__name__}: {cause}"
    return None if found <= limit else f"off by {found:.2g} of the largest value"


def largest_error(found: mx.array, wanted: mx.array) -> float:
    """Largest difference, in parts of the largest value."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    error = mx.abs(found - wanted).max() / mx.abs(wanted).max()
    # NaN is no agreement.
    return float("inf") if mx.isnan(error).item() else cast("float", error.item())


def cuda_report(why_not: Callable[[KernelLanguage], str | None]) -> KernelReport:
    """Test what is for CUDA only, if that is the default device."""
    if backend_name() != "cuda":
        return KernelReport(backend="stock")
    reason = why_not(CudaLanguage())
    return KernelReport(backend="stock" if reason else "cuda", rejected=reason)
