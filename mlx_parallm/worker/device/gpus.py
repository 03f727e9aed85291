"""The NVIDIA GPUs of this machine, without asking a driver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: ``VISIBLE``: the variable that says which GPUs a process may use.
VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


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
