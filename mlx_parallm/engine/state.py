"""What can be told of the engines at any time: nothing here waits for a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import generate_latest

from mlx_parallm.engine.interface import ServedEngine
from mlx_parallm.engine.metrics import MetricFamilies


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """The adapters that may be in one batch of a model.

    Attributes:
        num_slots: how many.
        num_resident: slots with an adapter in them.
        num_used: adapters that running sequences use.
    """

    num_slots: int
    num_resident: int
    num_used: int


@dataclass(frozen=True, slots=True)
class MetricsText:
    """The engines' metrics.

    Attributes:
        text: in Prometheus' format.
        slots: by models' first names.
    """

    text: bytes = b""
    slots: Mapping[str, SlotCounts] = field(default_factory=dict[str, SlotCounts])


class EngineState:
    """Answers about the engines. Safe from any thread.

    Attributes:
        engines: those that are loaded, by their models' first names; they come and go.
    """

    def __init__(self, families: MetricFamilies, engines: Mapping[str, ServedEngine]) -> None:
        self._families = families
        self.engines = engines

    def check_room(self, model: str, client: str, n: int) -> None:
        """Raise OverloadedError if a model's queue has no room; unknown models have room."""
        engine = self.engines.get(model)
        if engine is not None:
            engine.check_room(client, n)

    def num_running_and_waiting(self) -> tuple[int, int]:
        """Return the sequences of the latest step, over all models."""
        loads = [one.load for one in dict(self.engines).values()]
        return sum(one.num_running for one in loads), sum(one.num_waiting for one in loads)

    def cache_bytes(self) -> Mapping[str, int]:
        """Return the memory of the results that each loaded model keeps, by first names."""
        return {name: one.cache_bytes for name, one in dict(self.engines).items()}

    def metrics(self) -> MetricsText:
        """Return the engines' metrics."""
        counts: dict[str, SlotCounts] = {}
        for name, one in dict(self.engines).items():
            slots = one.adapters.policies.users.adapters
            counts[name] = SlotCounts(slots.num_slots, len(slots.resident), slots.num_used)
        return MetricsText(generate_latest(self._families.registry), counts)
