"""Questions about the engines that are answered at any time, without waiting for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from typing_extensions import override

from mlx_parallm.engine.metrics import labelled_by_engine
from mlx_parallm.engine.models import EngineState, QueueLoad
from mlx_parallm.types.errors import ParallmError

T = TypeVar("T")


#: ``SLOTS``: the gauges of adapters that may be in one batch of a model, and their help.
SLOTS = (
    ("mlx_parallm:adapter_slots", "Adapters that may be in one batch."),
    ("mlx_parallm:adapter_slots_used", "Slots with an adapter in them."),
    ("mlx_parallm:adapters_running", "Adapters that running sequences use."),
)


class StateQuery(Protocol[T]):
    """A question about the engines; it can be pickled, as its answer can."""

    def __call__(self, state: EngineState, /) -> T:
        """Return the answer."""
        ...

    def together(self, answers: Sequence[T | ParallmError]) -> T:
        """Return one answer for those of several engines that serve the same models."""
        ...


@dataclass(frozen=True, slots=True)
class CheckRoom(StateQuery[None]):
    """Raise OverloadedError if a model's queue has no room for samples of a client.

    Unknown models have room.
    """

    model: str
    client: str
    n: int

    @override
    def __call__(self, state: EngineState) -> None:
        engine = state.engines.get(self.model)
        if engine is not None:
            engine.check_room(self.client, self.n)

    @override
    def together(self, answers: Sequence[ParallmError | None]) -> None:
        """One engine with room is enough."""
        _answered(answers)


@dataclass(frozen=True, slots=True)
class ReadLoads(StateQuery[Sequence[QueueLoad | None]]):
    """Return the load of each engine; None for one that does not answer."""

    @override
    def __call__(self, state: EngineState) -> Sequence[QueueLoad]:
        """Return the load of this engine."""
        return [sum((engine.load for engine in dict(state.engines).values()), QueueLoad())]

    @override
    def together(
        self, answers: Sequence[Sequence[QueueLoad | None] | ParallmError]
    ) -> Sequence[QueueLoad | None]:
        """In the order of the engines."""
        _answered(answers)
        return [None if isinstance(answer, ParallmError) else answer[0] for answer in answers]


@dataclass(frozen=True, slots=True)
class ReadCacheBytes(StateQuery[Mapping[str, int]]):
    """Return the memory of the results that each loaded model keeps, by first names."""

    @override
    def __call__(self, state: EngineState) -> Mapping[str, int]:
        return {name: engine.cache_bytes for name, engine in dict(state.engines).items()}

    @override
    def together(self, answers: Sequence[Mapping[str, int] | ParallmError]) -> Mapping[str, int]:
        sizes = _answered(answers)
        return {name: sum(each.get(name, 0) for each in sizes) for name in sizes[0]}


@dataclass(frozen=True, slots=True)
class ReadMetrics(StateQuery[bytes]):
    """Return the engines' metrics in Prometheus' format."""

    @override
    def __call__(self, state: EngineState) -> bytes:
        registry = CollectorRegistry()
        gauges = [Gauge(name, text, ("model_name",), registry=registry) for name, text in SLOTS]
        for name, engine in dict(state.engines).items():
            slots = engine.policies.users.adapters
            counts = slots.num_slots, len(slots.resident), slots.num_used
            for gauge, count in zip(gauges, counts, strict=True):
                gauge.labels(name).set(count)
        return generate_latest(state.families.registry) + generate_latest(registry)

    @override
    def together(self, answers: Sequence[bytes | ParallmError]) -> bytes:
        """Samples get vLLM's label ``engine``, the engine's number."""
        _answered(answers)
        return labelled_by_engine(
            {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, bytes)}
        )


def _answered(answers: Sequence[T | ParallmError]) -> list[T]:
    """Return the answers that are no errors; raise the first error if all are."""
    values = [answer for answer in answers if not isinstance(answer, ParallmError)]
    for answer in answers:
        if not values and isinstance(answer, ParallmError):
            raise answer
    return values
