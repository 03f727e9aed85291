"""Behaviour that most kinds of models share; a kind overrides what it does otherwise.

A request has one answer, nothing is in flight between two turns, and nothing is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.adapter_names import NamedAdapter
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.engine.interface import Ask, Event, MemoryLimit, OpenModel, QueueLoad
from mlx_parallm.engine.policies import NoAdapters, Policies
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.worker.worker import Worker

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Answer(Protocol[T_co]):
    """The only event of a request that did not fail."""

    @property
    def request_id(self) -> str:
        """The request."""
        ...

    @property
    def results(self) -> T_co:
        """Return what it asked for."""
        ...


class AnswerReader(Generic[T]):
    """Waits for the answer to one request. Implements ``EventReader``; lives on the event loop.

    Attributes:
        request: whose answer this is.
        num_samples: 0, since the request takes no place among sequences.
        is_overfull: False, since there is only one event.
    """

    num_samples = 0
    is_overfull = False

    def __init__(self, request: Any) -> None:
        self.request = request
        self._answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    @property
    def is_complete(self) -> bool:
        """See ``EventReader``."""
        return self._answer.done()

    def put(self, event: Answer[T] | ErrorEvent) -> None:
        """See ``EventReader``."""
        if self._answer.done():
            return
        if isinstance(event, ErrorEvent):
            self._answer.set_exception(event.error)
            # The caller may have been cancelled; asyncio would log the error as lost.
            self._answer.exception()
        else:
            self._answer.set_result(event.results)

    def fail(self, error: ParallmError) -> None:
        """See ``EventReader``."""
        self.put(ErrorEvent(request_id=self.request.request_id, error=error))

    async def results(self) -> T:
        """Return what the request asked for once it is there; raise the request's error."""
        return await self._answer


class NoUsers:
    """Implements ``AdapterUsers`` for a model that takes no adapters."""

    def __init__(self) -> None:
        self.adapters = AdapterSlots(0)

    def uses(self, content: str) -> bool:
        """Return False."""
        del content
        return False

    def num_running(self, content: str) -> int:
        """Return 0."""
        del content
        return 0

    def refresh_weights(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class NoAdapterSet:
    """Implements ``AdapterSet`` for a model that takes no adapters."""

    policies: Policies

    @classmethod
    def of(cls, model: str) -> Self:
        """Return the set of a model of this first name."""
        return cls(Policies(model=model, users=NoUsers(), store=NoAdapters(), max_loaded=0))


class EngineDefaults:
    """The parts of ``ServedEngine`` that are the same for most kinds.

    Attributes:
        is_paused: see ``ServedEngine``.
    """

    settles_others = False
    live = None

    def __init__(self) -> None:
        self.is_paused = False

    @property
    def step_s(self) -> float:
        """See ``TurnTaker``: a turn takes the time that it is given."""
        return 0.0

    def ready_in_s(self) -> float:
        """See ``TurnTaker``: a step waits for nothing."""
        return 0.0

    def settle(self) -> Sequence[Event]:
        """See ``TurnTaker``: nothing is in flight between two turns."""
        return ()

    def prepare(self) -> bool:
        """See ``TurnTaker``: there is no warm-up."""
        return False

    def reset_cache(self, *, reset_running: bool = False) -> None:
        """See ``ServedEngine``: nothing is kept that depends on weights which change."""

    def check_room(self, client: str, count: int) -> None:
        """See ``ServedEngine``: ``submit`` decides."""

    @property
    def load(self) -> QueueLoad:
        """See ``ServedEngine``: there are no sequences."""
        return QueueLoad()

    @property
    def cache_bytes(self) -> int:
        """See ``ServedEngine``: no results are kept."""
        return 0


class KindDefaults:
    """The parts of ``Kind`` that are the same for most kinds."""

    def install(self, worker: Worker) -> None:
        """See ``Kind``: the worker needs nothing."""

    def memory_limit(self, settings: EngineConfig) -> MemoryLimit | None:
        """See ``Kind``: there is no limit."""
        del settings
        return None

    def read(self, config: ModelConfig, path: Path, settings: EngineConfig) -> OpenModel:
        """See ``Kind``: such models are not loaded later."""
        raise NotImplementedError


class ModelDefaults:
    """The parts of ``ServedModel`` that are the same for most kinds."""

    parent: str | None = None

    def facts(self) -> Mapping[str, Any]:
        """See ``ServedModel``."""
        return {}

    @property
    def tasks(self) -> Sequence[str]:
        """See ``ServedModel``."""
        return ()

    @property
    def max_len(self) -> int | None:
        """See ``ServedModel``: it reads no tokens."""
        return None

    @property
    def cache_tokens(self) -> int:
        """See ``ServedModel``: nothing is kept."""
        return 0

    def check(self, request: Any) -> None:
        """See ``ServedModel``: the engine checks requests."""

    def reader(self, request: Any) -> AnswerReader[Any]:
        """See ``ServedModel``."""
        return AnswerReader(request)

    def with_adapter(self, adapter: NamedAdapter) -> Self | None:
        """See ``ServedModel``: there are none."""
        del adapter
        return None

    def packed(self) -> Self:
        """See ``ServedModel``: it can be pickled as it is."""
        return self

    def unpack(self, ask: Ask) -> Self:
        """See ``PackedModel``."""
        del ask
        return self
