"""The metric families of a process. They are written on the engine thread and read by scrapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Gauge

from mlx_parallm.worker.device.properties import active_memory_bytes

F = TypeVar("F")


class MetricFamilies:
    """Every metric family of the process, in one registry; engines add label values."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[object, Any] = {}
        # Asked at each scrape.
        Gauge(
            "mlx_parallm:active_memory_bytes",
            "Memory of the arrays that MLX holds, in the engine's process.",
            registry=self.registry,
        ).set_function(active_memory_bytes)

    def of(self, make: Callable[[CollectorRegistry], F]) -> F:
        """Return the families that ``make`` declares in the registry; it is called once."""
        if make not in self._made:
            self._made[make] = make(self.registry)
        return cast("F", self._made[make])
