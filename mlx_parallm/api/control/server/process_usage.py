"""The resources that processes of a server use: processor time, memory and file descriptors."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PROC = Path("/proc")
# ROLES: modules that processes of a server run, with the values of the label ``process``.
ROLES = {
    "mlx_parallm.cli.engine_process": "engine",
    "mlx_parallm.cli.api_servers.process": "http",
}
SERVER = "server"
_SIZES = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """The resources of one process.

    Attributes:
        pid: its number.
        role: "server", "engine" or "http".
        cpu_s: processor time of all its threads so far, in seconds.
        resident_bytes: its memory that is in RAM.
        peak_bytes: the most memory in RAM that it has had.
        num_descriptors: its open file descriptors.
    """

    pid: int
    role: str
    cpu_s: float
    resident_bytes: int
    peak_bytes: int
    num_descriptors: int


def usage_of_processes() -> list[ProcessUsage]:
    """Return the usage of this process, and on Linux of the processes that it has started.

    Elsewhere, without other libraries, a process can read its own usage only.
    """
    if not (PROC / "self/stat").exists():
        return [_own_usage()]
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    pids = [os.getpid()]
    for pid in pids:
        pids += children.get(pid, ())
    return [usage for pid in pids if (usage := _usage(pid)) is not None]


def usage_families() -> list[Metric]:
    """Return ``usage_of_processes`` as metrics, whose names end as those of client libraries."""
    labels = ("process", "pid")
    cpu = CounterMetricFamily(
        "mlx_parallm:process_cpu_seconds", "Processor time of a process.", labels=labels
    )
    resident = GaugeMetricFamily(
        "mlx_parallm:process_resident_memory_bytes", "Memory of a process in RAM.", labels=labels
    )
    peak = GaugeMetricFamily(
        "mlx_parallm:process_peak_memory_bytes", "Most memory in RAM of a process.", labels=labels
    )
    descriptors = GaugeMetricFamily(
        "mlx_parallm:process_open_fds", "File descriptors of a process.", labels=labels
    )
    for usage in usage_of_processes():
        values = (usage.role, str(usage.pid))
        cpu.add_metric(values, usage.cpu_s)
        resident.add_metric(values, usage.resident_bytes)
        peak.add_metric(values, usage.peak_bytes)
        descriptors.add_metric(values, usage.num_descriptors)
    return [cpu, resident, peak, descriptors]


def _own_usage() -> ProcessUsage:
    # macOS has the largest size so far in bytes; the present one needs Mach's own calls.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return ProcessUsage(
        pid=os.getpid(),
        role=SERVER,
        cpu_s=time.process_time(),
        resident_bytes=peak * unit,
        peak_bytes=peak * unit,
        num_descriptors=len(os.listdir("/dev/fd")),
    )


def _parents() -> Iterator[tuple[int, int]]:
    """Yield all processes with their parents."""
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield int(folder.name), int(_stat(folder)[1])


def _stat(folder: Path) -> list[str]:
    """Return the fields of proc(5)'s ``stat`` from the third on, the state."""
    # The name before the last bracket may have any characters.
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _usage(pid: int) -> ProcessUsage | None:
    """Return the usage of a process; None if it has ended or belongs to somebody else."""
    folder = PROC / str(pid)
    with contextlib.suppress(OSError):
        fields = _stat(folder)
        ticks = int(fields[11]) + int(fields[12])
        status = (folder / "status").read_text(errors="replace")
        sizes = {name: int(size) * 1024 for name, size in _SIZES.findall(status)}
        return ProcessUsage(
            pid=pid,
            role=_role(pid, (folder / "cmdline").read_bytes().split(b"\0")),
            cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
            resident_bytes=sizes.get("VmRSS", 0),
            peak_bytes=sizes.get("VmHWM", 0),
            num_descriptors=len(os.listdir(folder / "fd")),
        )
    return None


def _role(pid: int, command: list[bytes]) -> str:
    if pid == os.getpid():
        return SERVER
    modules = [part.decode(errors="replace") for part in command]
    return next((ROLES[module] for module in modules if module in ROLES), "other")
