"""The core's view of the models that it serves, whatever they do.

A kind of model is one package: it implements ``Kind``, and ``KindBuilder``, which makes a
``ServedEngine`` and a ``ServedModel`` of a folder. The engine lives on the engine thread; the model
is what the event loop knows of it, and can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from mlx_parallm.config import EngineConfig, ModelConfig, ModelTask
from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.turns import TurnTaker
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError, ParallmError
from mlx_parallm.types.tracing import StepTracer
from mlx_parallm.types.work import Ends, RequestWork

if TYPE_CHECKING:
    from mlx_parallm.engine.live_weights import LiveWeights
    from mlx_parallm.engine.metrics import MetricFamilies
    from mlx_parallm.engine.policies import NamedAdapter, Policies
    from mlx_parallm.engine.state import EngineState
    from mlx_parallm.worker.worker import Worker

#: Called with what is being loaded and the share of it that is loaded, from 0 to 1.
TellProgress = Callable[[str, float], None]


class Ask(Protocol):
    """Asks the engines' state something from any thread; see ``EngineLife.query``."""

    def __call__(
        self, question: Callable[[EngineState], Any], /, key: Hashable = None
    ) -> Future[Any]:
        """Return the answer.

        Args:
            question: can be pickled.
            key: equal for questions that the same engine answers best.
        """
        ...


class Request(Protocol):
    """A request to one model."""

    @property
    def request_id(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def model(self) -> str:
        """The model's first name."""
        ...

    @property
    def adapter(self) -> str | None:
        """The name of an adapter of the model; None for the model itself."""
        ...

    def work(self) -> RequestWork:
        """Return what the request asks of an engine."""
        ...


class Event(Protocol):
    """Something that happened to a request."""

    @property
    def request_id(self) -> str:
        """The request."""
        ...

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it."""
        ...

    @property
    def ends(self) -> Ends:
        """Return whether a sample or the request ends with it."""
        ...


class EventReader(Protocol):
    """Takes the events of one request."""

    @property
    def num_samples(self) -> int:
        """Places in the model's queue that the request takes."""
        ...

    @property
    def is_complete(self) -> bool:
        """True once the last event was put."""
        ...

    @property
    def is_overfull(self) -> bool:
        """True if its reader is so far behind that the request should end."""
        ...

    def put(self, event: Any, /) -> None:
        """Take an event; those after the last are dropped."""
        ...

    def fail(self, error: ParallmError, /) -> None:
        """End with an error; events that were not read are dropped."""
        ...


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The load of one model, or of all models of an engine, in the latest step.

    Attributes:
        num_running: sequences in the batch.
        num_waiting: sequences that wait for a place in it.
        num_waiting_tokens: tokens of the prompts of sequences that wait.
        num_used_tokens: tokens that the KV blocks in use have room for.
        num_kv_tokens: tokens that all KV blocks have room for.
        num_requests: requests that have not ended.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_used_tokens: int = 0
    num_kv_tokens: int = 0
    num_requests: int = 0

    def __add__(self, other: QueueLoad) -> QueueLoad:
        """Return the load of both together."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return QueueLoad(*(count + other_count for count, other_count in pairs))


class ServedEngine(TurnTaker, Protocol):
    """Runs one model. It is not thread-safe: it lives on the engine thread.

    The engines of kinds inherit from this class. Members with a value or a body are defaults that
    suit most kinds.

    Attributes:
        is_paused: True while it begins no step, whatever waits.
        policies: the names under which the model computes; they outlive its stay in memory.
        live: its weights, which can be replaced and released; None if they never change.
    """

    policies: Policies
    is_paused: bool = False
    live: LiveWeights | None = None

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        ...

    def submit(self, request: Any, *, arrival_s: float | None = None) -> Sequence[Event]:
        """Queue a request; return its events that need no step, such as cached results.

        ``arrival_s`` is a reading of the monotonic clock: latencies are measured from it.

        Raises:
            InvalidRequestError: it can never be served.
            OverloadedError: the queue is full.
            ModelNotFoundError, ModelLoadingError: its adapter is not there, or has changed.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """End a request and free what it holds; False if it is not here."""
        ...

    def cancel(self, request_id: str) -> Sequence[Event]:
        """End a request as ``abort`` does; return the last events for its reader."""
        ...

    def release(self) -> None:
        """Free the memory of the model, which has no requests."""
        ...

    def reset_cache(self, *, reset_running: bool = False) -> None:
        """Forget what was computed before; ``reset_running`` recomputes what runs.

        By default nothing is kept that depends on weights which change.
        """

    def check_room(self, client: str, count: int) -> None:
        """Raise OverloadedError if the queue has no room; any thread may ask.

        By default only ``submit`` decides.
        """

    @property
    def load(self) -> QueueLoad:
        """Its load in the latest step; any thread may ask."""
        return QueueLoad(num_requests=self.num_requests)

    @property
    def cache_bytes(self) -> int:
        """Memory of the results that it keeps; any thread may ask."""
        return 0


class WorkBeside(TurnTaker, Protocol):
    """Work beside the served models, such as training. It lives on the engine thread.

    Such work inherits from this class. It takes requests of its own kind, which name a model.

    Attributes:
        is_paused: True while it begins no step, whatever waits.
    """

    is_paused: bool = False

    def takes(self, request: Any) -> bool:
        """True if a request is of its kind."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        ...

    def submit(self, request: Any, *, arrival_s: float | None = None) -> Sequence[Event]:
        """Queue a request; see ``ServedEngine.submit``."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request; False if it is not here."""
        ...

    def cancel(self, request_id: str) -> Sequence[Event]:
        """End a request as ``abort`` does; return the last events for its reader."""
        ...

    def forget(self, model: str) -> None:
        """Free what is kept of a loaded model: its weights change, or it goes to sleep."""
        ...


#: Makes the work beside the models, once they are loaded.
MakeBeside = Callable[["Worker", "MetricFamilies"], Sequence[WorkBeside]]


class PackedModel(Protocol):
    """A ``ServedModel`` on its way to another process."""

    def unpack(self, ask: Ask, /) -> ServedModel:
        """Return the model; ``ask`` queries the state of the engines that it came from."""
        ...


class ServedModel(Protocol):
    """The event loop's view of a loaded model, or of an adapter of one.

    The models of kinds inherit from this class. Members with a value or a body are defaults that
    suit most kinds.

    Attributes:
        names: the names that requests may use; the first is the one reported.
        root: the hub id or folder that it comes from.
        created: when it was loaded, in Unix seconds.
        traits: facts that the models of its kind have in common.
        parent: the first name of an adapter's model; None for a model.
        info: a dataclass of what was found out about the model when it was loaded; None if it
            reads no tokens.
    """

    names: tuple[str, ...]
    root: str
    created: int
    traits: KindTraits
    parent: str | None = None
    info: Any = None

    @property
    def memory(self) -> ModelMemory:
        """The memory of a loaded model, without its adapters and kept results."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return ``info`` by name."""
        return {} if self.info is None else asdict(self.info)

    @property
    def tasks(self) -> Sequence[str]:
        """The names of what requests may want of it."""
        return ()

    @property
    def input_modalities(self) -> Sequence[str]:
        """Return the kinds of input that requests may have: text, image."""
        return ("text",)

    @property
    def max_len(self) -> int | None:
        """The most tokens of a request; None if it reads no tokens."""
        return None if self.info is None else self.info.max_model_len

    @property
    def cache_tokens(self) -> int:
        """The number of tokens whose computation is kept for later requests."""
        return 0

    def check(self, request: Any, /) -> None:
        """Raise InvalidRequestError if the model can never serve a request.

        By default only the engine checks requests.
        """

    def reader(self, request: Any, /) -> EventReader:
        """Return what takes a request's events on the event loop."""
        return AnswerReader[Any](request)

    def with_adapter(self, adapter: NamedAdapter, /) -> Self | None:
        """Return an adapter of the model as a model; None if it must be loaded first."""
        del adapter
        return None

    def packed(self) -> PackedModel:
        """Return it in a form that can be pickled."""
        return self

    def unpack(self, ask: Ask, /) -> Self:
        """See ``PackedModel``."""
        del ask
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTraits:
    """Facts that the models of one kind have in common.

    Attributes:
        name: says what they do.
        is_default: True if one of them is meant where no model is named.
        loads_later: True if they can be loaded, evicted and unloaded while the server runs.
        can_change: True if their weights can be replaced.
        refuses_load: why they cannot be loaded later, after the model's folder or hub id.
        refuses_unload: why they cannot be unloaded, after the model's name.
        refuses_change: why their weights cannot be replaced, after the model's name.
        refuses_other: why requests for another kind are refused, after the model's name.
    """

    name: str
    is_default: bool = False
    loads_later: bool = False
    can_change: bool = False
    refuses_load: str = "is of a kind that is loaded when the server starts."
    refuses_unload: str = "cannot be unloaded while the server runs."
    refuses_change: str = "keeps the weights that it was loaded with."
    refuses_other: str = "serves requests of another kind."


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most bytes that the weights of one kind's models may take together.

    Attributes:
        num_bytes: the limit.
        owners: what these models are called, at the beginning of a sentence.
        flag: sets the limit.
    """

    num_bytes: int
    owners: str
    flag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Memory of a model, in bytes.

    Attributes:
        weights: its parameters and those of its draft model; 0 while they are not in memory.
        kv: its KV pool, whether blocks are in use or not.
        cache: results that are kept for equal inputs.
        adapters: tensors of its loaded adapters.
    """

    weights: int = 0
    kv: int = 0
    cache: int = 0
    adapters: int = 0


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
    """How busy one engine is.

    Attributes:
        rank: its number, from 0.
        readiness: whether it gets requests.
        load: over all of its models; empty while it does not answer.
        step_s: for how long the step in flight has run, in seconds.
    """

    rank: int
    readiness: Readiness
    load: QueueLoad = QueueLoad()
    step_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        """True if it gets requests."""
        return self.readiness is Readiness.READY


class ModelState(StrEnum):
    """The place of a model's weights.

    evicted: they were freed for another model; its next request loads it again.
    """

    LOADED = "loaded"
    LOADING = "loading"
    EVICTED = "evicted"


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
    """

    names: tuple[str, ...]
    root: str
    state: ModelState
    progress: float
    is_pinned: bool
    model: Any
    parent: str | None = None

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

    async def wait(self, name: str) -> None:
        """Return once a model or adapter is loaded; see ``EngineCore.wait``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """A model to be loaded while the server runs.

    Attributes:
        model: a folder or a hub id; or the name of a served model, to have it in memory.
        names: the names that requests are to use; ``model`` if there is none.
        task: as in ``ModelConfig``.
        dtype: as in ``ModelConfig``; None for the server's.
        revision: hub revision.
        max_model_len: cap on the length of an input in tokens; None takes the model's own.
        is_pinned: True if it is to stay in memory until it is unloaded.
    """

    model: str
    names: tuple[str, ...] = ()
    task: Literal["auto"] | ModelTask = "auto"
    dtype: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model that is ready to serve.

    Attributes:
        config: where it comes from.
        model: what the event loop knows of it.
        engine: runs it; None if it was evicted, and its next request loads it again.
    """

    config: ModelConfig
    model: ServedModel
    engine: ServedEngine | None


@dataclass(frozen=True, slots=True)
class StartedModel:
    """A ``BuiltModel`` as the event loop sees it."""

    config: ModelConfig
    model: ServedModel
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model to be loaded: its settings, all its names among them, and where its files are."""

    config: ModelConfig
    path: Path

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use; the first is the one reported."""
        return self.config.served_names


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Parts that every kind of model is built with.

    Attributes:
        settings: of the server.
        families: of metrics.
        worker: has the models.
        on_progress: is told how far the load is.
        tracer: records every step; None if none does.
    """

    settings: EngineConfig
    families: MetricFamilies
    worker: Worker
    on_progress: TellProgress
    tracer: StepTracer | None = None


class PendingModel(Protocol):
    """A model that is being loaded while others serve. It lives on the engine thread."""

    @property
    def name(self) -> str:
        """The first of its names."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""
        ...

    def advance(self) -> float:
        """Load the next part; return the share that is loaded, from 0 to 1."""
        ...

    def finish(self, kept: Policies | None = None) -> BuiltModel:
        """Return the model, ready to serve; ``kept`` are the policies that it had before."""
        ...

    def close(self) -> None:
        """Free what is not part of a finished model."""
        ...


#: Opens a model on the engine thread, whose metric families and worker it is given.
OpenModel = Callable[["MetricFamilies", "Worker"], PendingModel]


class Kind(Protocol):
    """One kind of model as the event loop knows it; its process may be without MLX.

    Kinds inherit from this class: methods with a body are defaults.

    Attributes:
        traits: facts that its models have in common.
    """

    traits: KindTraits

    def memory_limit(self, settings: EngineConfig) -> MemoryLimit | None:
        """Return what its models may take together if they are loaded later; None for no limit."""
        del settings
        return None

    def serves(self, config: ModelConfig, path: Path) -> bool:
        """True if a folder's model is of this kind; raise ModelLoadError if it is unreadable."""
        ...

    def read(self, config: ModelConfig, path: Path, settings: EngineConfig) -> OpenModel:
        """Read what needs no MLX of a model to be loaded later; any thread may call this.

        It is called only if such models are loaded later. The result can be pickled.

        Raises:
            ModelLoadError: it cannot be read.
        """
        raise AssertionError(f"{path} is of a kind that is not loaded later")


class KindBuilder(Kind, Protocol):
    """A kind as the engine's process knows it: it loads the models."""

    def declare(self, families: MetricFamilies) -> None:
        """Have its metric families there before any model adds values."""
        ...

    def install(self, worker: Worker) -> None:
        """Give a worker what loads its models."""

    def build(self, models: Collection[ModelFolder], context: BuildContext) -> list[BuiltModel]:
        """Load models on the calling thread, which is the engine thread.

        Raises:
            ConfigError: they do not fit their settings or the memory.
            ModelLoadError: one cannot be loaded.
        """
        ...
