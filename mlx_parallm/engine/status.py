"""The state of models and engines as the event loop reports it, and where requests enter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from typing_extensions import override

from mlx_parallm.engine.metrics import labelled_by_engine
from mlx_parallm.engine.models import EngineState, KindTraits, QueueLoad, ServedModel
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError, ParallmError

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
class ReadRunningAdapters(StateQuery[Set[str]]):
    """Return the names of adapters that sequences of any engine run with."""

    @override
    def __call__(self, state: EngineState) -> Set[str]:
        return {n for each in dict(state.engines).values() for n in each.policies.running()}

    @override
    def together(self, answers: Sequence[Set[str] | ParallmError]) -> Set[str]:
        return {name for names in _answered(answers) for name in names}


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
class ReadMemoryLimit(StateQuery[int | None]):
    """Return the most bytes that models may take on each device; None if it is not known."""

    @override
    def __call__(self, state: EngineState) -> int | None:
        return state.memory_limit

    @override
    def together(self, answers: Sequence[int | ParallmError | None]) -> int | None:
        """All engines load the same models, so the least limit holds for each."""
        return min((limit for limit in _answered(answers) if limit is not None), default=None)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of the engine, over all models.

    Attributes:
        num_requests: admitted requests that have not ended.
        num_running: sequences in the batch of the latest step.
        num_waiting: sequences that waited for a place in it.
    """

    num_requests: int
    num_running: int
    num_waiting: int


class Readiness(StrEnum):
    """The readiness of an engine: it gets requests, or why it does not.

    starting: it has died, or it loads.
    catching up: it has loaded, and carries out the changes that the others had before.
    silent: its process says nothing; it is killed if that goes on.
    """

    READY = "ready"
    CATCHING_UP = "catching_up"
    STARTING = "starting"
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Load of one engine.

    Attributes:
        rank: its number, from 0.
        readiness: whether it gets requests.
        load: over all of its models; empty while it does not answer.
        step_s: for how long the step in flight has run, in seconds.
    """

    rank: int
    readiness: Readiness
    load: QueueLoad = field(default_factory=QueueLoad)
    step_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        """True if it gets requests."""
        return self.readiness is Readiness.READY


class ModelState(StrEnum):
    """The place of a model's weights.

    evicted: they were freed; its next request loads it again.
    available: it lies in a folder of models, and its first request loads it.
    """

    LOADED = "loaded"
    LOADING = "loading"
    EVICTED = "evicted"
    AVAILABLE = "available"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model that requests may name, loaded or not.

    Attributes:
        names: the first is the one reported.
        root: the hub id or folder that it comes from.
        state: where its weights are.
        progress: share of the load that is done, from 0 to 1; 1 once it is loaded.
        is_pinned: True if it stays in memory until it is unloaded.
        model: what is known about it; None until it was loaded once.
        parent: an adapter's model, which state, progress and pin are about; None for a model.
        ttl_s: seconds after its last request until it is evicted; None: for ever.
        size_bytes: the bytes of its files; None if they were not looked at.
    """

    names: tuple[str, ...]
    root: str
    state: ModelState
    progress: float
    is_pinned: bool
    model: Any
    parent: str | None = None
    ttl_s: float | None = None
    size_bytes: int | None = None

    @property
    def is_default(self) -> bool:
        """True if the model may be meant where no model is named."""
        model: ServedModel | None = self.model
        return model is not None and model.traits.is_default

    @property
    def can_change(self) -> bool:
        """True if the model's weights can be replaced."""
        model: ServedModel | None = self.model
        return model is not None and model.traits.can_change

    @property
    def may_adapt(self) -> bool:
        """True if the model takes adapters, or was never loaded, so that this is not known."""
        model: ServedModel | None = self.model
        return model is None or model.traits.takes_adapters

    def no_adapters(self, name: str) -> InvalidRequestError:
        """Return the error for an adapter of a model that takes none, called ``name``."""
        traits: KindTraits = self.model.traits
        return InvalidRequestError(f"{name} {traits.refuses_adapters}", param="model")

    def wrong_kind(self, name: str) -> InvalidRequestError:
        """Return the error for a request of another kind, which calls the model ``name``."""
        traits: KindTraits = self.model.traits
        return InvalidRequestError(f"{name} {traits.refuses_other}", param="model")


class RequestDoor(Protocol):
    """Where requests of every kind of model enter, on the event loop."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return all models that requests may name, and those that are being loaded."""
        ...

    def find(self, name: str) -> ModelStatus | None:
        """Return the model, or the adapter of one, of this name."""
        ...

    def not_found(self, name: str) -> ModelNotFoundError:
        """Return the error for a name that nothing has; it lists what is served."""
        ...

    async def wait(self, name: str, client: str = "") -> None:
        """Return once what is named in a ``ModelLoadingError`` is loaded, for a client.

        Raises:
            ModelNotFoundError: it was unloaded meanwhile.
            ModelLoadError: it cannot be loaded.
        """
        ...

    def set_ttl(self, name: str, ttl_s: float | None) -> None:
        """Evict a model once it was idle for so many seconds; None: never. Others are ignored."""
        ...

    async def check_queue(self, model: str, client: str, n: int) -> None:
        """Refuse ``n`` samples of a client early; ``open_reader`` decides.

        It costs nearly nothing. ``model`` is a first name.

        Raises:
            OverloadedError: the queue had no room for them a moment ago.
        """
        ...

    async def open_reader(self, request: Any) -> Any:
        """Admit a request; return the reader of its events; see ``EngineCore.open_reader``."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request between two steps and free its blocks; unknown ids are ignored."""
        ...

    async def refresh(self) -> None:
        """Bring the names of adapters up to date."""
        ...
