"""The cost of a run to the processes of a server, by its metrics, and to the load client."""

from __future__ import annotations

import re
import resource
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.units import readable_bytes

_SAMPLE = re.compile(
    r"^mlx_parallm:process_(cpu_seconds_total|peak_memory_bytes)\{(.*)\} (\S+)$", re.MULTILINE
)
_LABEL = re.compile(r'(pid|process)="([^"]*)"')
CPU, PEAK = "cpu_seconds_total", "peak_memory_bytes"
CLIENT = "load client"

#: ``Usage``: by pid, the role of a process and the value of each metric.
Usage = Mapping[str, tuple[str, Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """The resources that processes of one role used in a run, added up.

    Attributes:
        role: "server", "engine", "http" or "load client".
        cpu_s: processor time in seconds.
        peak_bytes: the most memory in RAM that each has had since it began, added up.
    """

    role: str
    cpu_s: float
    peak_bytes: int


def read_usage(metrics: str) -> Usage:
    """Return the usage in a text of Prometheus metrics; empty if it is another server's."""
    usage: dict[str, tuple[str, dict[str, float]]] = {}
    for name, fields, value in _SAMPLE.findall(metrics):
        labels = dict(_LABEL.findall(fields))
        _, values = usage.setdefault(labels["pid"], (labels["process"], {}))
        values[name] = float(value)
    return usage


def process_costs(before: Usage, after: Usage) -> list[ProcessCost]:
    """Return what each role used meanwhile; processes that have ended are left out."""
    cpu_s: dict[str, float] = defaultdict(float)
    peaks: dict[str, int] = defaultdict(int)
    for pid, (role, values) in after.items():
        _, first = before.get(pid, (role, {}))
        cpu_s[role] += values.get(CPU, 0) - first.get(CPU, 0)
        peaks[role] += int(values.get(PEAK, 0))
    return [ProcessCost(role, cpu_s[role], peaks[role]) for role in peaks]


def client_cost(began_cpu_s: float = 0.0) -> ProcessCost:
    """Return what this process, and those that it has started and awaited, have used.

    ``began_cpu_s`` is the processor time that does not count.
    """
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    unit = 1 if sys.platform == "darwin" else 1024
    return ProcessCost(
        CLIENT,
        sum(use.ru_utime + use.ru_stime for use in uses) - began_cpu_s,
        sum(use.ru_maxrss * unit for use in uses),
    )


def format_costs(costs: Sequence[ProcessCost]) -> str:
    """Return one line for each role."""
    return "\n".join(
        f"{cost.role:<13} {cost.cpu_s:.2f} s of processor time,"
        f" {readable_bytes(cost.peak_bytes)} of memory at most"
        for cost in costs
    )
