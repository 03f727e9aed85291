"""The commands of the engine thread, and where they enter on the event loop.

They are applied between steps, in order. Replies may be called on any thread: on the engine's, or
on one that speaks to its process.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.kind import PendingModel
from mlx_parallm.engine.live_weights import WeightsHistory
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.missed import MissedState
from mlx_parallm.engine.models import EngineState, ServedEngine, WorkBeside
from mlx_parallm.engine.policies import AdapterUpload, Policies
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.work import Event, EventReader, Request

if TYPE_CHECKING:
    from mlx_parallm.worker.worker import Worker

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Admit a request; ``reply`` is called with None or the refusal.

    Attributes:
        request: names its model by the first name.
        arrival_s: the caller's monotonic clock; latencies are measured from it.
        upload: the request's adapter, if it may have been unloaded meanwhile.
        reader: takes the request's events on the engine thread; None sends them to the event loop.
            Work beside a model, such as training, submits its requests with a reader.
        reply: may be called on any thread.
    """

    request: Request
    arrival_s: float
    upload: AdapterUpload | None = None
    reader: EventReader | None = None
    reply: Callable[[ParallmError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End a request and free its blocks. Unknown ids are ignored.

    ``is_notified``: its reader gets a last event.
    """

    request_id: str
    is_notified: bool = False


class LoopState(Protocol):
    """The engines of a process, and what is being made for them, as commands see and change it.

    Attributes:
        engines: the loaded models' engines by their first names; they come and go.
        policies: each model's policies, likewise; they stay when a model is evicted.
        families: metrics of all kinds of models.
        worker: the door to the device.
        missed: what evicted models had before this engine was started, by their first names.
        pending: models that are being loaded, by their commands' number.
        stagings: adapters that are being uploaded into a slot, likewise.
        beside: work beside the models.
        is_paused: True if no steps are begun, of models loaded later neither.
        asleep: those of ``SLEEP_TAGS`` that are asleep, likewise.
        sleep_level: of the latest sleep.
    """

    engines: MutableMapping[str, ServedEngine]
    policies: dict[str, Policies]
    missed: dict[str, MissedState]
    families: MetricFamilies
    worker: Worker
    pending: dict[int, PendingModel]
    stagings: dict[int, AdapterStaging]
    beside: Sequence[WorkBeside]
    is_paused: bool
    asleep: Sequence[str]
    sleep_level: int

    def takers(self) -> Sequence[ServedEngine | WorkBeside]:
        """Return all that takes turns."""
        ...

    def add(self, name: str, engine: ServedEngine, /) -> None:
        """Let the engine of a loaded model take turns; ``name`` is the model's first name."""
        ...

    def deliver(self, events: Sequence[Event]) -> None:
        """Send events to their readers: on this thread, or on the event loop."""
        ...


class EngineCommand(Protocol[R_co]):
    """A command that the engine thread carries out between two steps; see ``engine_commands``.

    It and its result can be pickled, because the engines may be in another process.
    """

    def __call__(self, loop: LoopState, /) -> R_co:
        """Carry it out and return its result."""
        ...

    @abstractmethod
    def noted(self, journal: StateJournal, result: Any, /) -> None:
        """Note what it left, once every engine has carried it out with this result."""
        ...


class LeavesNothing:
    """A command after which an engine needs nothing to be like the others."""

    __slots__ = ()

    def noted(self, journal: StateJournal, result: Any, /) -> None:
        """See ``EngineCommand``."""


@dataclass(slots=True)
class StateJournal:
    """The state of engines that have all had the same commands, for one that is started anew.

    Only the latest state is kept: an adapter as it is now, and the tensors of a model that its
    folder does not have.

    Attributes:
        models: what loads a model that was loaded later, by its first name.
        unloaded: what unloads a model that was loaded at the start, likewise.
        resized: what gave a model another amount of memory, likewise.
        weights: of models whose weights or version have changed, likewise; evicted ones, too.
        adapters: what loads an adapter, by its model's first name and its own.
        is_paused: True if no steps are begun.
        asleep: the tags that are asleep.
        sleep_level: of the latest sleep.
        pending: what began a change that is being prepared, because its commit may come any time.
    """

    models: dict[str, Sequence[EngineCommand[Any]]] = field(
        default_factory=dict[str, "Sequence[EngineCommand[Any]]"]
    )
    resized: dict[str, EngineCommand[Any]] = field(default_factory=dict[str, "EngineCommand[Any]"])
    unloaded: dict[str, Sequence[EngineCommand[Any]]] = field(
        default_factory=dict[str, "Sequence[EngineCommand[Any]]"]
    )
    weights: dict[str, WeightsHistory] = field(default_factory=dict[str, "WeightsHistory"])
    adapters: dict[tuple[str, str], EngineCommand[Any]] = field(
        default_factory=dict[tuple[str, str], "EngineCommand[Any]"]
    )
    is_paused: bool = False
    asleep: Sequence[str] = ()
    sleep_level: int = 0
    pending: dict[tuple[str, int | str], Any] = field(
        default_factory=dict[tuple[str, "int | str"], Any]
    )


@runtime_checkable
class JoinsResults(Protocol):
    """A command whose result differs among engines that serve the same models.

    The results of other commands are equal: all engines have had the same commands before, in the
    same order.
    """

    def together(self, results: Sequence[Any], /) -> Any:
        """Return one result for the results of all engines."""
        ...


class Change:
    """A command after which the engines differ that have carried it out, and that have not.

    Engines that fail where others have carried it out are started anew.
    """

    __slots__ = ()


@runtime_checkable
class NeedsDecision(Protocol):
    """A command that does what is best for one engine's requests, such as evict an adapter.

    Several engines answer its inquiry first, and all carry out what is decided from the answers.
    """

    def inquiry(self) -> EngineCommand[Any]:
        """Return what to ask the engines; its ``together`` decides, or raises the refusal."""
        ...

    def decided(self, decision: Any, /) -> EngineCommand[Any]:
        """Return the command that carries out the decision."""
        ...


class Once(Generic[T]):
    """A value that is made for the first of those who need it, on whichever thread that is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: list[T] = []

    def get(self, make: Callable[[], T]) -> T:
        """Return the value, after making it if need be."""
        with self._lock:
            if not self._values:
                self._values.append(make())
            return self._values[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Carry out a command between two steps; ``reply`` is called with its result or its error.

    ``packed``: where calls of several engines with the same action keep it as it is sent.
    """

    action: EngineCommand[Any]
    reply: Callable[[Any], None]
    packed: Once[Any] | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop; requests still in flight are dropped."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Look for work: something has arrived that an engine waits for."""


Command = Submit | Abort | Call | Stop


class EngineDoor(Protocol):
    """Where commands enter, on the event loop."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return all models that requests may name, and those that are being loaded."""
        ...

    def status_of(self, name: str) -> ModelStatus | None:
        """See ``ServedModels``."""
        ...

    def model_names(self) -> Collection[str]:
        """See ``ServedModels``."""
        ...

    async def call(self, action: EngineCommand[T]) -> T:
        """Carry out a command between two steps; return its result, or raise its error."""
        ...

    def send(self, action: EngineCommand[Any]) -> None:
        """Have a command carried out without waiting for it."""
        ...

    def ask(self, question: Callable[[EngineState], Any], /, key: Hashable = None) -> Future[Any]:
        """Ask any of the engines that serve; see ``Ask``."""
        ...

    def hold(self, model: str) -> AbstractAsyncContextManager[None]:
        """Have a model in memory while the block runs; see ``ModelDirectory``."""
        ...

    async def cancel_all(self) -> int:
        """End every request with the tokens that it has; return how many there were."""
        ...

    def open_requests(self) -> Sequence[Any]:
        """Return the requests that were admitted and have not ended."""
        ...

    async def wait_until_idle(self) -> None:
        """Return once no request is open."""
        ...
