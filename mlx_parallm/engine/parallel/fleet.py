"""The engines of one server: what each of them is given, and what happens when one dies."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_parallm.engine.adapter_commands import EnsureAdapter
from mlx_parallm.engine.commands import (
    Abort,
    Call,
    EngineCommand,
    NeedsDecision,
    Once,
    StateJournal,
    Stop,
    Submit,
)
from mlx_parallm.engine.kind import StartedModel
from mlx_parallm.engine.life import END_TIMEOUT_S, Deliver, EngineLife
from mlx_parallm.engine.parallel.dispatcher import Dispatcher
from mlx_parallm.engine.parallel.gathering import Gathering
from mlx_parallm.engine.parallel.journal import catch_up
from mlx_parallm.engine.parallel.member import Member, check_room, delay_after, smallest
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.engine.parallel.suspects import LEAST_SERVING
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.engine.status import Readiness
from mlx_parallm.types.errors import EngineDeadError, ParallmError
from mlx_parallm.types.work import Event
from mlx_parallm.units import readable_bytes

logger = logging.getLogger(__name__)

NONE_SERVES = "No engine is reachable; they are dialled again and again."


class Fleet:
    """Engines that serve the same models. Its methods may be called on any thread.

    Attributes:
        is_started: True once all have loaded.
    """

    def __init__(
        self,
        lives: Sequence[EngineLife],
        router: Router,
        deliver: Deliver,
        on_end: Callable[[], None],
        restart_delay_s: Callable[[int], float] | None = None,
        read_free_bytes: Callable[[], int | None] = lambda: None,
        seed: int = 0,
        *,
        outlives_engines: bool = False,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            lives: one for each engine.
            router: chooses among as many engines.
            deliver: takes the events.
            on_end: called when an engine cannot load, or the last one has died.
            read_free_bytes: returns how much memory engines may still take together; None if
                they do not share memory, or it is not known.
            restart_delay_s: returns the seconds to wait after so many earlier deaths in a row.
            seed: draws the seeds of requests without one.
            outlives_engines: True to go on when the last engine has died, and refuse everything
                until one has been started anew: all may be cut off for a moment.
        """
        self._outlives_engines = outlives_engines
        self._restart_delay_s = restart_delay_s or delay_after
        self._read_free_bytes = read_free_bytes
        self._members = [Member(life) for life in lives]
        self._router = router
        self._on_end = on_end
        # Guards everything below: events come on the engines' threads.
        self._lock = threading.RLock()
        self._dispatcher = Dispatcher(self._members, router, deliver, self._lock, seed)
        self._journal = StateJournal()
        self._gatherings: list[Gathering] = []
        # Commands that wait until an engine that was started anew has caught up, or until the
        # engines have carried out what is being decided.
        self._held: list[Call] = []
        self._is_deciding = False
        # Requests that wait for their adapter, by their ids, and those cancelled meanwhile.
        self._entering: dict[str, Submit] = {}
        self._leaving: set[str] = set()
        self._models: Sequence[StartedModel] = ()
        self.is_started = False
        self._cause: BaseException | None = None
        self._is_stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        # One entry for each engine that has loaded, or has failed to.
        self._starts: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Let the first engine load; the others follow in ``wait_until_loaded``."""
        self._start(0)

    def wait_until_loaded(self) -> Sequence[StartedModel]:
        """Return the models once every engine has them.

        The others begin to load when the first has loaded: the memory of the weights is then known.

        Raises:
            ConfigError: the memory has no room for so many copies.
            Exception: the error that an engine failed with.
        """
        self._starts.get()
        self.check()
        check_room(self._models, len(self._members) - 1, self._read_free_bytes())
        others = range(1, len(self._members))
        for rank in others:
            self._start(rank)
        for _ in others:
            self._starts.get()
            self.check()
        models = [started.model for started in self._models]
        states = {model.names[0]: model.state_cache for model in models}
        self._router.set_cache(
            sum(model.cache_tokens for model in models),
            {name: cache for name, cache in states.items() if cache is not None},
        )
        self.is_started = True
        weights = sum(started.model.memory.weights for started in self._models)
        count = len(self._members)
        logger.info(
            "%d engines, each with a copy of the weights: %s in all",
            count,
            readable_bytes(weights * count),
        )
        return self._models

    def _start(self, rank: int) -> None:
        thread = threading.Thread(
            target=self._run, args=(rank,), name=f"engine-{rank}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def check(self) -> None:
        """Raise what the engines died of, if they did."""
        if self._cause is not None:
            raise self._cause

    @property
    def _serves(self) -> bool:
        """True if an engine serves."""
        return any(member.is_serving for member in self._members)

    def readiness(self) -> list[Readiness]:
        """Return whether each engine gets requests."""
        with self._lock:
            # An engine that was silent may answer again, for which no event needs to come.
            self._dispatcher.release()
            return [member.readiness for member in self._members]

    def stop(self) -> None:
        """End every engine, and wait for that."""
        self._is_stopping.set()
        for member in self._members:
            member.life.stop_within(END_TIMEOUT_S)
            member.life.put(Stop())
        for thread in self._threads:
            thread.join()

    def submit(self, command: Submit) -> None:
        """Give a request to an engine, or parts of it to several."""
        with self._lock:
            if self._cause is not None:
                # The event loop ends all requests once it has been notified.
                return
            if not self._serves:
                command.reply(EngineDeadError(NONE_SERVES))
            elif command.upload is not None:
                self._load_adapter_of(command, command.upload)
            else:
                self._dispatcher.submit(command)

    def _load_adapter_of(self, command: Submit, upload: AdapterUpload) -> None:
        """Submit a request once all engines have its adapter, not only the one that gets it."""
        request = command.request
        self._entering[request.request_id] = command
        action = EnsureAdapter(upload, request.model)
        self.call(Call(action=action, reply=partial(self._enter, request.request_id)))

    def _enter(self, request_id: str, result: Any) -> None:
        command = self._entering.pop(request_id, None)
        is_cancelled = request_id in self._leaving
        self._leaving.discard(request_id)
        if command is None:
            # It was aborted meanwhile.
            return
        if isinstance(result, ParallmError):
            command.reply(result)
            return
        self.submit(replace(command, upload=None))
        if is_cancelled:
            self.abort(Abort(request_id=request_id, is_notified=True))

    def abort(self, command: Abort) -> None:
        """End a request where it is."""
        with self._lock:
            if command.request_id in self._entering:
                if command.is_notified:
                    self._leaving.add(command.request_id)
                else:
                    del self._entering[command.request_id]
                return
            self._dispatcher.abort(command)

    def call(self, command: Call) -> None:
        """Have every engine carry out a command."""
        with self._lock:
            waiting = any(member.has_loaded and not member.is_serving for member in self._members)
            if waiting or self._is_deciding:
                self._held.append(command)
            elif not self._serves:
                command.reply(EngineDeadError(NONE_SERVES))
            elif isinstance(command.action, NeedsDecision):
                self._is_deciding = True
                reply = partial(self._decided, command, command.action)
                self._carry_out(Call(action=command.action.inquiry(), reply=reply))
            else:
                self._carry_out(command)

    def _carry_out(self, command: Call) -> None:
        ranks = [rank for rank, member in enumerate(self._members) if member.is_serving]
        gathering = Gathering(command, ranks)
        self._gatherings.append(gathering)
        packed = Once[Any]()
        for rank in ranks:
            reply = partial(self._replied, gathering, rank)
            self._members[rank].life.put(Call(action=command.action, reply=reply, packed=packed))

    def _decided(self, command: Call, action: NeedsDecision, decision: Any) -> None:
        """Carry out what was decided, before any command that came meanwhile."""
        self._is_deciding = False
        if isinstance(decision, ParallmError):
            command.reply(decision)
        else:
            self._carry_out(replace(command, action=action.decided(decision)))

    def _run(self, rank: int) -> None:
        """Live one engine's lives, on a thread of its own."""
        member = self._members[rank]
        cause: BaseException = EngineDeadError(f"Engine {rank} has ended.")
        while True:
            try:
                member.life.run(partial(self._take, rank), partial(self._loaded, rank))
            except BaseException as death:  # noqa: BLE001 - of whatever kind, the engine is dead
                cause = death
            if not self._goes_on_after(rank, cause):
                break
        member.life.end()

    def _loaded(self, rank: int, models: Sequence[StartedModel]) -> None:
        with self._lock:
            if not self.is_started:
                self._models = smallest(self._models or models, models)
            self._members[rank].has_loaded = True
            self._members[rank].has_failed = False
            self._join_if_settled()
        self._starts.put(None)

    def _join_if_settled(self) -> None:
        """Let engines serve that have loaded, unless a command is being carried out by others.

        The commands that they missed come before any other.
        """
        if self._gatherings:
            return
        for rank, member in enumerate(self._members):
            if member.has_loaded and not member.is_serving:
                missed = catch_up(self._journal)
                member.num_missed = len(missed)
                for action in missed:
                    reply = partial(self._caught_up, rank, action)
                    member.life.put(Call(action=action, reply=reply))
                member.is_serving = True
                self._router.on_start(rank)
                logger.info("engine %d is ready", rank)
        self._dispatcher.release()
        held, self._held = self._held, []
        for command in held:
            self.call(command)

    def _caught_up(self, rank: int, action: EngineCommand[Any], result: Any) -> None:
        with self._lock:
            self._members[rank].num_missed -= 1
        if isinstance(result, ParallmError):
            with self._lock:
                self._depose(rank, action, result)
            self._dispatcher.flush()

    def _depose(self, rank: int, action: EngineCommand[Any], error: ParallmError) -> None:
        """Let an engine end that would answer with other weights than the others do.

        It is started anew. What it still answers is not read.
        """
        member = self._members[rank]
        if not member.is_serving:
            return
        logger.error("engine %d has failed: %s: %s", rank, type(action).__name__, error)
        member.life.put(Stop())
        if any(other.is_serving for other in self._members if other is not member):
            member.is_serving = member.has_loaded = False
            self._hand_over(rank, was_killed=False)

    def _goes_on_after(self, rank: int, cause: BaseException) -> bool:
        """Note the death of an engine; return True if it is to be started anew."""
        with self._lock:
            member = self._members[rank]
            was_serving, member.is_serving, member.has_loaded = member.is_serving, False, False
            member.life.clear()
            if self._is_stopping.is_set():
                return False
            if not self.is_started or not (self._serves or self._outlives_engines):
                self._cause = self._cause or cause
                self._starts.put(None)
                self._on_end()
                return False
            logger.error("engine %d died; it is started anew", rank, exc_info=cause)
            if was_serving:
                self._hand_over(rank, was_killed=True)
            else:
                member.has_failed = member.num_deaths > 0
                self._end_waiting_if_hopeless()
            delay_s = self._restart_delay_s(member.num_deaths)
            member.num_deaths += 1
        self._dispatcher.flush()
        return not self._is_stopping.wait(delay_s)

    def _end_waiting_if_hopeless(self) -> None:
        """End the suspects that wait if one engine serves, and no other could be started."""
        is_serving = [member.is_serving for member in self._members]
        if is_serving.count(True) < LEAST_SERVING and all(
            member.is_serving or member.has_failed for member in self._members
        ):
            self._dispatcher.end_waiting()

    def _hand_over(self, rank: int, *, was_killed: bool) -> None:
        """Let other engines have what a dead one had; see ``Dispatcher.hand_over``."""
        if self._serves:
            self._dispatcher.hand_over(rank, was_killed=was_killed)
        else:
            self._dispatcher.lose_all(rank)
        for gathering in list(self._gatherings):
            gathering.drop(rank)
            self._end_if_complete(gathering)

    def _replied(self, gathering: Gathering, rank: int, result: Any) -> None:
        with self._lock:
            gathering.add(rank, result)
            self._end_if_complete(gathering)
        self._dispatcher.flush()

    def _end_if_complete(self, gathering: Gathering) -> None:
        if not gathering.is_complete or gathering not in self._gatherings:
            return
        self._gatherings.remove(gathering)
        action, result = gathering.command.action, gathering.result()
        if not isinstance(result, ParallmError):
            action.noted(self._journal, result)
        for rank, error in gathering.failed().items():
            self._depose(rank, action, error)
        gathering.command.reply(result)
        self._join_if_settled()

    def _take(self, rank: int, events: Sequence[Event]) -> None:
        with self._lock:
            self._members[rank].num_deaths = 0
            self._dispatcher.take(rank, events)
        self._dispatcher.flush()
