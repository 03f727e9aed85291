"""Engines in parallel without models: their state is what commands have made of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.adapter_commands import (
    BeginAdapter,
    CommitAdapter,
    DropStagedAdapter,
    ListVersions,
    StageAdapterPart,
)
from mlx_parallm.engine.commands import Abort, Call, EngineCommand, Stop, Submit
from mlx_parallm.engine.engine_commands import CommitUpdate, DropUpdate, PrepareUpdate
from mlx_parallm.engine.kind import StartedModel
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.loader import BeginLoad, CommitLoad
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.parallel.fleet import Fleet
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.engine.status import Readiness
from mlx_parallm.types.errors import ControlError, EngineDeadError, ParallmError
from mlx_parallm.types.events import FinishReason, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.work import Event, Request
from tests.fleet_models import FakeModel, begin_pending, make_engine

#: How long a test waits for what must come; no test depends on how fast it comes.
PATIENCE_S = 60.0


class Death(BaseException):
    """Ends a life."""


@dataclass(frozen=True)
class Die:
    """An order to end a life."""


@dataclass(frozen=True)
class Answer:
    """An order to give a token to every sample of every request, or the last one."""

    is_last: bool = False


@dataclass(frozen=True)
class Order:
    """An order to a life, as an action: it comes after the commands before it."""

    order: Die | Answer

    def __call__(self, host: Any) -> None:
        raise AssertionError


class FakeLife:
    """Implements ``EngineLife``: carries out commands, and answers requests on demand."""

    def __init__(self) -> None:
        self.num_lives = 0
        self.is_silent = False
        self.requests: dict[str, Request] = {}
        # What the next request is refused with, if it is.
        self.refusal: ParallmError | None = None
        # The commands of this type fail; None: none do.
        self.fails: type[Any] | None = None
        self.num_failures = 0
        # Set while it may load; what it dies of then, if it does.
        self.may_load = threading.Event()
        self.may_load.set()
        self.fails_to_load = False
        # Set while it carries out commands.
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, command: Any) -> None:
        self.inbox.put(command)

    def clear(self) -> None:
        self.inbox = queue.SimpleQueue()

    def run(
        self,
        deliver: Callable[[Sequence[Event]], None],
        on_loaded: Callable[[Sequence[StartedModel]], None],
    ) -> None:
        self.num_lives += 1
        assert self.may_load.wait(PATIENCE_S)
        if self.fails_to_load:
            raise Death
        self.requests = {}
        engine = make_engine("m")
        self.weights, self.users, self.live = engine.weights, engine.users, engine.live
        self.host = cast(
            EngineLoop,
            SimpleNamespace(
                engines={},
                policies={},
                missed={},
                pending={},
                stagings={},
                beside=(),
                is_paused=False,
                asleep=(),
                sleep_level=0,
                families=None,
                worker=None,
                deliver=deliver,
            ),
        )
        self.host.add = cast(Any, self._add)
        self._add("m", engine)
        on_loaded([StartedModel(ModelConfig(), cast(Any, FakeModel()), True)])
        while not isinstance(command := self.inbox.get(), Stop):
            self._apply(command, deliver)

    def _add(self, name: str, engine: Any) -> None:
        self.host.engines[name] = engine
        self.host.policies[name] = engine.policies

    def _apply(self, command: Any, deliver: Callable[[Sequence[Event]], None]) -> None:
        match command:
            case Die():
                raise Death
            case Submit(request=request, reply=reply):
                assert command.upload is None, "only this engine would have the adapter"
                reply(_guarded(lambda: self._admit(request)))
            case Abort(request_id=request_id, is_notified=is_notified):
                request = self.requests.pop(request_id, None)
                if request is not None and is_notified:
                    indices = range(request.work().num_samples)
                    deliver([_token(request_id, index, True) for index in indices])
            case Call(action=Order(order), reply=reply):
                self._apply(order, deliver)
                reply(None)
            case Call(action=action, reply=reply):
                reply(_guarded(lambda: self._carry_out(action)))
            case Answer(is_last=is_last):
                deliver(
                    [
                        _token(name, index, is_last)
                        for name, request in self.requests.items()
                        for index in range(request.work().num_samples)
                    ]
                )
                self.requests = {} if is_last else self.requests
            case _:
                raise AssertionError(command)

    def _carry_out(self, action: EngineCommand[Any]) -> Any:
        assert self.goes_on.wait(PATIENCE_S)
        if self.fails is not None and isinstance(action, self.fails):
            self.fails = None
            self.num_failures += 1
            raise ControlError("The device has failed.")
        return action(self.host)

    def _admit(self, request: Request) -> None:
        """Use the request's adapter; raise as an engine does."""
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        if request.adapter is not None:
            self.live.policies.weights_of(request.adapter)
        self.requests[request.request_id] = request

    def ask(self, question: Any, key: Any = None) -> Any:
        raise EngineDeadError("It has no state.")

    def readiness(self) -> Sequence[Readiness]:
        return [Readiness.SILENT if self.is_silent else Readiness.READY]

    def stop_within(self, timeout_s: float) -> None:
        pass

    def end(self) -> None:
        pass

    @property
    def state(self) -> tuple[Any, ...]:
        """Return what must be equal in all engines."""
        infos, versions = ListVersions()(self.host)
        adapters = sorted((info.name, info.digest, info.version) for info in infos)
        return self.weights.tensors, adapters, versions["m"].label, self.weights.prepared

    @property
    def models(self) -> tuple[Any, ...]:
        """Return what must be equal in all engines whose models come and go."""
        infos, versions = ListVersions()(self.host)
        engines = {name: cast(Any, engine) for name, engine in self.host.engines.items()}
        return (
            {name: engine.weights.tensors for name, engine in engines.items()},
            {name: version.label for name, version in versions.items()},
            sorted((info.model, info.name, info.digest, info.version) for info in infos),
        )


def _guarded(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except ParallmError as refusal:
        return refusal


def _token(request_id: str, index: int, is_last: bool) -> TokenEvent:
    reason = FinishReason.LENGTH if is_last else None
    return TokenEvent(
        request_id=request_id, index=index, token_ids=(1,), text="x", finish_reason=reason
    )


class FakeFleet:
    """A fleet of fake lives, whose orders have been carried out when a method returns.

    Attributes:
        make_life: returns what the fleet has in place of a fake life.
        lives: of each engine.
        events: what the event loop was given.
        ended: set when the fleet has died.
        dispatcher: has the requests.
    """

    make_life: Callable[[FakeLife], Any] = staticmethod(lambda life: life)

    def __init__(self, num_engines: int, *, outlives_engines: bool = False) -> None:
        self.lives = [FakeLife() for _ in range(num_engines)]
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.router = Router(num_engines, max_num_seqs=4)
        self.fleet = Fleet(
            [self.make_life(life) for life in self.lives],
            self.router,
            self.events.extend,
            self.ended.set,
            restart_delay_s=lambda _: 0.0,
            outlives_engines=outlives_engines,
        )
        self.dispatcher = self.fleet._dispatcher
        self.fleet.start()
        self.fleet.wait_until_loaded()
        self._numbers = iter(range(1 << 30))

    def call(self, action: EngineCommand[Any]) -> Any:
        """Return the result of a command, or the refusal."""
        future: Future[Any] = Future()
        self.fleet.call(Call(action=action, reply=future.set_result))
        return future.result(PATIENCE_S)

    def settle(self) -> None:
        """Wait until every engine has carried out what it was given."""
        self.call(ListVersions())

    def submit(self, request_id: str, num_samples: int = 1, **details: Any) -> ParallmError | None:
        """Return what an engine replies to a request; ``details`` are those of ``begin``."""
        return self.begin(request_id, num_samples, **details).result(PATIENCE_S)

    def begin(
        self,
        request_id: str,
        num_samples: int = 1,
        *,
        adapter: str | None = None,
        upload: AdapterUpload | None = None,
        prompt: str | None = None,
    ) -> Future[ParallmError | None]:
        """Submit a request, perhaps of an adapter, which may come with it; return the reply.

        ``prompt`` is the id, so that prompts differ, unless it is given.
        """
        request = GenerateRequest(
            request_id=request_id,
            model="m",
            prompt_ids=(1, 2, 3, *(prompt or request_id).encode()),
            params=SamplingParams(n=num_samples),
            adapter=adapter,
        )
        return self.send(request, upload)

    def send(
        self, request: Request, upload: AdapterUpload | None = None
    ) -> Future[ParallmError | None]:
        """Submit a request of any kind; return the reply."""
        future: Future[ParallmError | None] = Future()
        reply = future.set_result
        self.fleet.submit(Submit(request=request, arrival_s=0.0, upload=upload, reply=reply))
        return future

    def cancel(self, request_id: str) -> None:
        """End a request and notify its reader; the engines may not have done that yet."""
        self.fleet.abort(Abort(request_id=request_id, is_notified=True))

    def abort(self, request_id: str, *, is_notified: bool = False) -> None:
        """End a request, and wait until all engines have."""
        self.fleet.abort(Abort(request_id=request_id, is_notified=is_notified))
        self.settle()

    def order(self, rank: int, order: Die | Answer) -> None:
        """Give an engine an order, and wait until all have done what came before."""
        action = cast(Any, Order(order))
        self.fleet._members[rank].life.put(Call(action=action, reply=lambda _: None))
        if not isinstance(order, Die):
            self.settle()

    def kill(self, rank: int, first: Callable[[], None] = lambda: None) -> None:
        """End an engine's life, and wait for its next one; it dies before it does what is first."""
        before = self.lives[rank].num_lives
        self.order(rank, Die())
        first()
        # Commands wait for an engine that is being started.
        self.await_life(rank, before + 1)

    def leave_dead(self, rank: int) -> None:
        """End an engine's life, and wait until that is known; ``may_load`` begins the next one."""
        life = self.lives[rank]
        before = life.num_lives
        life.may_load.clear()
        self.order(rank, Die())
        # The events of its death have been delivered before it loads.
        while life.num_lives == before:
            pass
        self.settle()

    def revive(self, rank: int) -> None:
        """Let an engine load, and wait until it serves."""
        self.lives[rank].may_load.set()
        self.await_life(rank, self.lives[rank].num_lives)

    def await_life(self, rank: int, number: int) -> None:
        """Wait until an engine serves in its life of this number, or a later one."""
        while self.lives[rank].num_lives < number or not self.fleet._members[rank].is_serving:
            self.settle()
        self.settle()

    def do(self, action: EngineCommand[Any]) -> None:
        """Have a command carried out that nothing may refuse."""
        result = self.call(action)
        assert not isinstance(result, ParallmError), result

    def load(self, name: str) -> None:
        """Load a model that is not there."""
        number = next(self._numbers)
        self.do(BeginLoad(number, partial(begin_pending, name)))
        self.do(CommitLoad(number))

    def prepare(self, update: WeightsUpdate, model: str = "m") -> bool:
        """Return True if new weights are ready; otherwise they are dropped."""
        refusal = self.call(PrepareUpdate(model, update))
        if isinstance(refusal, ParallmError):
            self.call(DropUpdate(model))
        return refusal is None

    def commit(self, model: str = "m") -> None:
        """Let all engines compute with the weights that were prepared."""
        self.do(CommitUpdate(model))

    def load_adapter(self, upload: AdapterUpload, model: str = "m") -> bool:
        """Return True if an adapter was loaded."""
        number = next(self._numbers)
        result = self.call(BeginAdapter(number, upload, model, takes_slot=True))
        while result is True:
            result = self.call(StageAdapterPart(number))
        if not isinstance(result, ParallmError):
            result = self.call(CommitAdapter(number))
        if isinstance(result, ParallmError):
            self.call(DropStagedAdapter(number))
        return not isinstance(result, ParallmError)

    def states(self) -> list[Any]:
        """Return the state of each engine."""
        self.settle()
        return [life.state for life in self.lives]

    def stop(self) -> None:
        """End all lives."""
        self.fleet.stop()
