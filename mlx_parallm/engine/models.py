"""A model as the core runs it, and as the event loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.turns import TurnTaker
from mlx_parallm.types.work import Event, EventReader, StateCache

if TYPE_CHECKING:
    from mlx_parallm.engine.live_weights import LiveWeights
    from mlx_parallm.engine.policies import NamedAdapter, Policies
    from mlx_parallm.worker.worker import Worker


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

    def resized(self, num_bytes: int) -> Any:
        """Return a ``BuiltModel`` with so many bytes besides its weights, in another engine.

        This one, which has no requests, steps no more. By default it is None: the memory of a model
        does not change.
        """
        del num_bytes
        return None

    def reset_cache(self, *, reset_running: bool = False, reset_external: bool = True) -> None:
        """Forget what was computed before; ``reset_running`` recomputes what runs.

        ``reset_external``: also forget what is kept outside of the device's memory. By default
        nothing is kept that depends on weights which change.
        """

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on any thread, when something arrives that its work waits for.

        By default work waits for commands only.
        """

    def save(self) -> None:
        """Have all computed before saved outside of the device's memory, which is to be released.

        No step may be in flight; running requests are computed anew. By default nothing is saved.
        """

    def save_part(self) -> bool:
        """Save a part of what ``save`` does; return True if there is more.

        No request may run. By default nothing is saved.
        """
        return False

    def close(self) -> None:
        """End what it keeps outside of this thread: it takes no more steps."""

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
MakeBeside = Callable[["Worker", MetricFamilies], Sequence[WorkBeside]]


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engines of a process, as queries see them on any thread.

    Attributes:
        families: of metrics.
        engines: those that are loaded, by their models' first names; they come and go.
        memory_limit: most bytes that the models may take on a device; None if it is not known.
    """

    families: MetricFamilies
    engines: Mapping[str, ServedEngine]
    memory_limit: int | None = None


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


class PackedModel(Protocol):
    """A ``ServedModel`` on its way to another process."""

    def unpack(self, ask: Ask, /) -> ServedModel:
        """Return the model; ``ask`` queries the state of the engines that it came from."""
        ...


class Named(Protocol):
    """A model, or an adapter of one.

    Attributes:
        names: that requests may use; the first is the one reported.
        parent: the first name of an adapter's model; None for a model.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """See above."""
        ...

    @property
    def parent(self) -> str | None:
        """See above."""
        ...


def name_for(model: Named, requested: str | None) -> str:
    """Return what the answer to a request calls the model that the request named so.

    A model that stands for a name that is not served answers with its own.
    """
    if requested is None or (model.parent is None and requested not in model.names):
        return model.names[0]
    return requested


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
        state_cache: the states after prefixes that each engine keeps; None if prefixes are found
            without one.
        refuses_unload: why it stays in memory, after its name; None if it can be unloaded.
    """

    names: tuple[str, ...]
    root: str
    created: int
    traits: KindTraits
    parent: str | None = None
    info: Any = None
    state_cache: StateCache | None = None
    refuses_unload: str | None = None

    @property
    def memory(self) -> ModelMemory:
        """The memory of a loaded model, without its adapters and kept results."""
        ...

    @property
    def kv_memory(self) -> tuple[int, int]:
        """The bytes of its KV, states after prefixes included, and the least that it serves with.

        By default the latter are the same: they do not change.
        """
        return self.memory.kv, self.memory.kv

    def facts(self) -> Mapping[str, Any]:
        """Return ``info`` by name."""
        return {} if self.info is None else asdict(self.info)

    def card(self) -> Mapping[str, Any]:
        """Return the fields that lists of models have for its kind alone."""
        return {}

    @property
    def tasks(self) -> Sequence[str]:
        """The names of what requests may want of it."""
        return ()

    @property
    def input_modalities(self) -> Sequence[str]:
        """Return the kinds of input that requests may have: text, image; none if it reads none."""
        return () if self.max_len is None else ("text",)

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


class LoadedModel:
    """A model as the result of a command, which may have to go to another process.

    Attributes:
        name: its first name.
    """

    def __init__(self, name: str, model: ServedModel | PackedModel) -> None:
        self.name = name
        self._model = model

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to pickle it: the model is packed."""
        model: Any = self._model
        return LoadedModel, (self.name, model.packed())

    def unpack(self, ask: Ask) -> ServedModel:
        """Return the model; ``ask`` queries the engines that it came from."""
        return self._model.unpack(ask)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTraits:
    """Facts that the models of one kind have in common.

    Attributes:
        name: says what they do.
        is_default: True if one of them is meant where no model is named.
        can_change: True if their weights can be replaced.
        takes_adapters: True if requests may name adapters of them.
        refuses_change: why their weights cannot be replaced, after the model's name.
        refuses_adapters: why they take no adapters, after the model's name.
        refuses_other: why requests for another kind are refused, after the model's name.
    """

    name: str
    is_default: bool = False
    can_change: bool = False
    takes_adapters: bool = False
    refuses_change: str = "keeps the weights that it was loaded with."
    refuses_adapters: str = "takes no adapters."
    refuses_other: str = "serves requests of another kind."


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
