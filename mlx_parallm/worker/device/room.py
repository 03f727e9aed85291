"""Memory of changes of weights and adapters: looked for first, and given back if it is too little.

On the CPU it must be looked for: MLX does not check what ``malloc`` returns, and Linux kills a
process that touches more than there is.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Generator
from contextlib import contextmanager
from traceback import clear_frames

from mlx_parallm.machine import trim_heap
from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.device.properties import backend_name, free_memory_bytes, give_back_memory

# LACK: texts of the RuntimeErrors by which MLX's allocators refuse.
LACK = re.compile(r"malloc|out of memory|insufficient memory|unable to allocate", re.IGNORECASE)


def check_room(num_bytes: int, what: str) -> None:
    """Raise OutOfMemoryError unless the device has so much free memory; ``what`` takes it.

    Metal is not asked: what it recommends is less than what it can allocate.
    """
    if backend_name() == "metal":
        return
    free = free_memory_bytes()
    if free is not None and num_bytes > free:
        # MLX and the C library keep memory of what is gone.
        give_back()
        free = free_memory_bytes()
    if free is not None and num_bytes > free:
        raise _error(what, num_bytes, free)


def lacks_memory(problem: BaseException) -> bool:
    """True if an allocation failed."""
    if isinstance(problem, RuntimeError):
        return LACK.search(str(problem)) is not None
    return isinstance(problem, MemoryError | OutOfMemoryError)


def freed(problem: BaseException) -> OutOfMemoryError:
    """Return a failed allocation's error, after freeing what it left behind.

    The frames that failed hold arrays: these are freed now instead of once nobody has the error
    any more.
    """
    clear_frames(problem.__traceback__)
    give_back()
    if isinstance(problem, OutOfMemoryError):
        return problem
    text = f"{type(problem).__name__}: {problem}"
    return OutOfMemoryError(text, free_bytes=free_memory_bytes())


@contextmanager
def naming_lack(what: str, num_bytes: int | None) -> Generator[None]:
    """Raise OutOfMemoryError if memory is lacking in the context, and free what this allocated.

    The error names ``num_bytes``; None if they are not known.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OutOfMemoryError) as problem:
        if not lacks_memory(problem):
            raise
        error = freed(problem)
        if error.needed_bytes is None and num_bytes is not None:
            error = _error(what, num_bytes, error.free_bytes, why=f" ({error})")
        raise error from None


def give_back() -> None:
    """Return the memory of unused arrays to the system."""
    gc.collect()
    give_back_memory()
    # The C library keeps tensors that are freed (``keep_freed_memory``): an update would seem to
    # need its bytes for ever, and a later one would be refused.
    trim_heap()


def _error(what: str, needed: int, free: int | None, why: str = "") -> OutOfMemoryError:
    has = "what is free is not known"
    if free is not None:
        has = f"{free} bytes ({readable_bytes(free)}) are free"
    return OutOfMemoryError(
        f"{what} needs {needed} bytes ({readable_bytes(needed)}) beside what the server has, and "
        f"{has}{why}. Nothing changed.",
        needed_bytes=needed,
        free_bytes=free,
    )
