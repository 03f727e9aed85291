"""Failures of the device, which may be raised by other work than that which failed.

A GPU on Metal runs out of memory after the work was submitted. MLX keeps one error for a stream:
the next that waits or submits raises and clears it, whichever model it serves. Everything that was
in flight is then without results, although its own wait may succeed (``Error`` and ``Event`` of
MLX's Metal backend).

Some failures are final: after an illegal access of memory, all later calls of CUDA in the process
fail, and macOS ignores what a process submits that has caused too many errors.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import mlx.core as mx

from mlx_parallm.types.errors import DeviceLostError

logger = logging.getLogger(__name__)

#: DEVICE_ERRORS: what MLX raises when the device fails or has no memory.
DEVICE_ERRORS = (RuntimeError, MemoryError)
#: LATE begins MLX's message about work that failed after it was submitted.
LATE = "[METAL] Command buffer execution failed"
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def is_device_error(error: BaseException) -> bool:
    """Return True if an error, or one that caused it, may be the device's."""
    return any(isinstance(each, DEVICE_ERRORS) for each in _causes(error))


def drain_device() -> Exception | None:
    """Wait until the device is idle and free what is cached; return the error that it had kept."""
    kept = None
    try:
        mx.synchronize()
    except RuntimeError as error:
        # MLX has waited before it raises, and has cleared the error.
        logger.warning("the device had failed: %s", error)
        kept = error
    # A lost device frees nothing.
    with suppress(RuntimeError):
        mx.clear_cache()
    return kept


def why_lost() -> RuntimeError | None:
    """Return why the idle device computes nothing any more; None if it does."""
    lost = None
    # MLX may have kept an error of earlier work for the first attempt.
    for _ in range(2):
        try:
            mx.eval(mx.arange(4) + 1)
        except RuntimeError as error:
            lost = error
        except MemoryError:
            # The host has none at the moment.
            return None
        else:
            return None
    return lost


class DeviceFaults:
    """The failures of this process's device that took with them what was in flight.

    Attributes:
        count: their number; work that was begun before the latest has no results.
        num_noted: errors that were noted, late or not.
        may_wait: True if a failure may wait for the device.
        lost: why the device computes nothing any more; None while it does.
    """

    def __init__(self, *, may_wait: bool = True) -> None:
        """``may_wait`` is False with ranks: the device waits forever for the sums of a lost one."""
        self.count = 0
        self.num_noted = 0
        self.may_wait = may_wait
        self.lost: RuntimeError | None = None

    def note(self, error: Exception) -> None:
        """Wait until the device is idle, after an error; count it if it came late."""
        self.num_noted += 1
        kept = None
        if self.may_wait:
            kept = drain_device()
            self.lost = self.lost or why_lost()
        else:
            with suppress(RuntimeError):
                mx.clear_cache()
        if kept is not None or any(LATE in str(each) for each in _causes(error)):
            self.count += 1

    def check(self) -> None:
        """Raise DeviceLostError if the device computes nothing any more."""
        if self.lost is not None:
            raise DeviceLostError(f"The device is lost: {self.lost}") from self.lost


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and those that it was raised from."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes
