"""What this process may still take of the machine's memory, by the limits that are set for it."""

from __future__ import annotations

import mmap
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.units import readable_bytes


class _Controller(NamedTuple):
    """The files of a cgroup's memory controller."""

    folder: str
    limit: str
    usage: str
    reclaimable: str


_VERSION_2 = _Controller("", "memory.max", "memory.current", "inactive_file")
_VERSION_1 = _Controller(
    "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)


def bytes_within_limits(root: Path = Path("/")) -> int | None:
    """Return what the address space and the cgroups leave; None where nothing limits them.

    ``root`` is the folder of ``proc`` and ``sys``.
    """
    found = [*_address_space(root), *_cgroups(root)]
    return max(0, min(found)) if found else None


def check_mappable(num_bytes: int) -> None:
    """Find out whether the system hands out so much memory, which is not touched.

    MLX's CPU allocator does not look at what ``malloc`` returns: the process would end with a
    segmentation fault.

    Raises:
        OutOfMemoryError: it does not.
    """
    try:
        mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError) as cause:
        raise OutOfMemoryError(
            f"The system does not hand out {readable_bytes(num_bytes)} of memory: {cause}."
        ) from cause


def _address_space(root: Path) -> Iterator[int]:
    """Yield what is left of the address space (``ulimit -v``) if it has a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    statm = root / "proc/self/statm"
    if limit != resource.RLIM_INFINITY and statm.exists():
        yield limit - int(statm.read_text().split()[0]) * resource.getpagesize()


def _cgroups(root: Path) -> Iterator[int]:
    """Yield what each limited cgroup of this process leaves, those around it included."""
    listing = root / "proc/self/cgroup"
    if not listing.exists():
        return
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_memory = not controllers or "memory" in controllers.split(",")
        if is_memory:
            controller = _VERSION_1 if controllers else _VERSION_2
            top = root / "sys/fs/cgroup" / controller.folder
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):
                yield from _left_in(folder, controller)
                if folder == top:
                    break


def _left_in(folder: Path, controller: _Controller) -> Iterator[int]:
    limit, usage = folder / controller.limit, folder / controller.usage
    if not (limit.exists() and usage.exists()) or limit.read_text().strip() == "max":
        return
    # Files that were read count as usage, and are given up before anything is refused.
    stat = folder / "memory.stat"
    found = stat.exists() and re.search(
        rf"^{controller.reclaimable} (\d+)$", stat.read_text(), re.MULTILINE
    )
    reclaimable = int(found[1]) if found else 0
    yield int(limit.read_text()) - int(usage.read_text()) + reclaimable
