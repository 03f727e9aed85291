"""Memory that the limits set for this process leave."""

from __future__ import annotations

import mmap
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.units import readable_bytes

# _AVAILABLE: the counters of ``vm_stat`` whose pages can be handed out without compressing others.
_AVAILABLE = ("Pages free", "File-backed pages", "Pages purgeable")
# VM_STAT_TIMEOUT_S: a command that takes longer says nothing.
VM_STAT_TIMEOUT_S = 10.0


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


def host_free_bytes() -> int | None:
    """Return the bytes of the machine's memory that this process may still take; None if unknown.

    They are known on Linux and macOS. All that other programs hold is taken, even if macOS could
    compress it.
    """
    if sys.platform == "darwin":
        return _mac_free_bytes()
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    limits = (int(match[1]) * 1024 if match else None, bytes_within_limits())
    return min((limit for limit in limits if limit is not None), default=None)


def available_in(statistics: str) -> int | None:
    """Return the bytes that macOS can hand out at once; None if they cannot be read.

    They are free pages, pages of files, which can be read again, and pages that programs have
    marked as purgeable, which are not pages of files. ``statistics`` is what ``vm_stat`` prints.
    """
    page_size = re.search(r"page size of (\d+) bytes", statistics)
    counts = [re.search(rf"^{name}:\s+(\d+)", statistics, re.MULTILINE) for name in _AVAILABLE]
    if page_size is None or None in counts:
        return None
    return int(page_size[1]) * sum(int(count[1]) for count in counts if count is not None)


def _mac_free_bytes() -> int | None:
    try:
        done = subprocess.run(
            ["vm_stat"], capture_output=True, text=True, check=True, timeout=VM_STAT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return available_in(done.stdout)


def bytes_within_limits(root: Path = Path("/")) -> int | None:
    """Return the bytes that the address space and the cgroups leave; None without limits.

    ``root`` is the folder of ``proc`` and ``sys``.
    """
    left = [*_address_space(root), *_cgroups(root)]
    return max(0, min(left)) if left else None


def check_mappable(num_bytes: int) -> None:
    """Map and unmap so much memory, without touching it, to see that the system hands it out.

    MLX's CPU allocator does not look at what ``malloc`` returns: the process would end with a
    segmentation fault.

    Raises:
        OutOfMemoryError: the system does not.
    """
    try:
        mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError) as cause:
        raise OutOfMemoryError(
            f"The system cannot provide {readable_bytes(num_bytes)} of memory: {cause}."
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
    # The page cache counts as usage, but the kernel evicts it before it refuses memory.
    stat = folder / "memory.stat"
    match = stat.exists() and re.search(
        rf"^{controller.reclaimable} (\d+)$", stat.read_text(), re.MULTILINE
    )
    reclaimable = int(match[1]) if match else 0
    yield int(limit.read_text()) - int(usage.read_text()) + reclaimable
