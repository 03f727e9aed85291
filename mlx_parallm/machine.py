"""The machine, and the user's place on it: processors, GPUs, freed memory, the cache folder."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

#: ``VISIBLE``: the variable that says which GPUs a process may use.
VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


def num_processors() -> int:
    """Return their number: those of the machine, unless a container or ``taskset`` allows fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def trim_heap() -> None:
    """Return freed memory to the system, which glibc does only when it is called for that."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def user_cache(environment: Mapping[str, str]) -> Path:
    """Return the user's cache folder for this program (XDG Base Directory); it may not exist.

    Raises:
        RuntimeError: the user has no home folder.
    """
    caches = environment.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is ignored.
    home = Path(caches) if caches.startswith("/") else Path.home() / ".cache"
    return home / "mlx_parallm"


def visible_devices(
    environment: Mapping[str, str] = os.environ, devices: Path = NVIDIA_DEVICES
) -> list[str]:
    """Return the names of the GPUs that this process may use; empty without an NVIDIA GPU."""
    listed = environment.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    count = len(list(devices.iterdir())) if devices.is_dir() else 0
    return [str(number) for number in range(count)]


def count_cuda_devices(
    environment: Mapping[str, str] = os.environ, devices: Path = NVIDIA_DEVICES
) -> int:
    """Return the number of NVIDIA devices of this process; 0 on a Mac, whose GPU is shared."""
    return len(visible_devices(environment, devices))
