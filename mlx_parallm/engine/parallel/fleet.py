"""The engines of one server: what each of them is given, and what happens when one dies."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_parallm.engine.commands import Abort, Call, Command, HostCommand, Stop, Submit
from mlx_parallm.engine.interface import Event, StartedModel
from mlx_parallm.engine.life import Deliver, EngineLife
from mlx_parallm.engine.parallel.gathering import Gathering
from mlx_parallm.engine.parallel.journal import StateJournal
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.types.errors import EngineDeadError, ParallmError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.units import readable_bytes

logger = logging.getLogger(__name__)

# MAX_RESTART_DELAY_S: most seconds until an engine that dies again and again is started anew.
MAX_RESTART_DELAY_S = 60.0


@dataclass(slots=True)
class _Member:
    """One engine.

    Attributes:
        life: its life, or the next one while it is dead.
        inbox: the commands that it is given.
        is_serving: True if it has loaded, and has had every command that the others had.
        has_loaded: True if it has loaded, and waits for those commands.
        num_deaths: how often it has died in a row without an answer in between.
    """

    life: EngineLife
    inbox: queue.SimpleQueue[Command]
    is_serving: bool = False
    has_loaded: bool = False
    num_deaths: int = 0


@dataclass(slots=True)
class _Open:
    """A request that has not ended; ``is_admitted`` once its caller has had the reply."""

    command: Submit
    is_admitted: bool = False


class Fleet:
    """Engines that serve the same models. Its methods may be called on any thread."""

    def __init__(
        self,
        lives: Sequence[EngineLife],
        router: Router,
        deliver: Deliver,
        on_end: Callable[[], None],
        restart_delay_s: Callable[[int], float] | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            lives: one for each engine.
            router: chooses among as many engines.
            deliver: takes the events.
            on_end: called when an engine cannot load, or the last one has died.
            restart_delay_s: returns the seconds to wait after so many earlier deaths in a row.
        """
        self._restart_delay_s = restart_delay_s or _restart_delay_s
        self._members = [_Member(life, queue.SimpleQueue()) for life in lives]
        self._router = router
        self._deliver = deliver
        self._on_end = on_end
        # Guards everything below: events come on the engines' threads.
        self._lock = threading.RLock()
        self._open: dict[str, _Open] = {}
        self._journal = StateJournal()
        self._gatherings: list[Gathering] = []
        # Commands that wait until an engine that was started anew has caught up.
        self._held: list[Call] = []
        self._models: Sequence[StartedModel] = ()
        self._is_started = False
        self._cause: BaseException | None = None
        self._is_stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        # One entry for each engine that has loaded, or has failed to.
        self._starts: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Let every engine load."""
        for rank in range(len(self._members)):
            thread = threading.Thread(
                target=self._run, args=(rank,), name=f"engine-{rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def wait_until_loaded(self) -> Sequence[StartedModel]:
        """Return the models once every engine has them; raise what one of them failed with."""
        for _ in self._members:
            self._starts.get()
            self.check()
        self._router.set_cache(sum(started.model.cache_tokens for started in self._models))
        self._is_started = True
        weights = sum(started.model.memory.weights for started in self._models)
        count = len(self._members)
        logger.info(
            "%d engines, each with a copy of the weights: %s in all",
            count,
            readable_bytes(weights * count),
        )
        return self._models

    def check(self) -> None:
        """Raise what the engines died of, if they did."""
        if self._cause is not None:
            raise self._cause

    def stop(self) -> None:
        """End every engine, and wait for that."""
        self._is_stopping.set()
        for member in self._members:
            member.life.give_up_load()
            member.inbox.put(Stop())
        for thread in self._threads:
            thread.join()

    def submit(self, command: Submit) -> None:
        """Give a request to an engine."""
        request_id = command.request.request_id
        with self._lock:
            if self._cause is not None:
                # The event loop ends all requests once it has been notified.
                return
            rank = self._router.place(request_id, command.request.work())
            self._open[request_id] = _Open(command)
            self._send(request_id, rank)

    def abort(self, command: Abort) -> None:
        """End a request where it is."""
        with self._lock:
            placed = self._router.placements.get(command.request_id)
            if placed is None:
                return
            self._members[placed.rank].inbox.put(command)
            if not command.is_notified:
                self._forget(command.request_id)

    def call(self, command: Call) -> None:
        """Have every engine carry out a command."""
        with self._lock:
            if any(member.has_loaded and not member.is_serving for member in self._members):
                self._held.append(command)
                return
            ranks = [rank for rank, member in enumerate(self._members) if member.is_serving]
            gathering = Gathering(command, ranks)
            self._gatherings.append(gathering)
            for rank in ranks:
                reply = partial(self._replied, gathering, rank)
                self._members[rank].inbox.put(Call(action=command.action, reply=reply))

    def _run(self, rank: int) -> None:
        """Live one engine's lives, on a thread of its own."""
        member = self._members[rank]
        cause: BaseException = EngineDeadError(f"Engine {rank} has ended.")
        while True:
            try:
                member.life.run(
                    member.inbox, partial(self._take, rank), partial(self._loaded, rank)
                )
            except BaseException as death:  # noqa: BLE001 - of whatever kind, the engine is dead
                cause = death
            if not self._goes_on_after(rank, cause):
                break
        member.life.end()

    def _loaded(self, rank: int, models: Sequence[StartedModel]) -> None:
        with self._lock:
            self._models = self._models or models
            self._members[rank].has_loaded = True
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
                for action in self._journal.commands():
                    reply = partial(self._caught_up, rank, action)
                    member.inbox.put(Call(action=action, reply=reply))
                member.is_serving = True
                self._router.on_start(rank)
                logger.info("engine %d is ready", rank)
        held, self._held = self._held, []
        for command in held:
            self.call(command)

    def _caught_up(self, rank: int, action: HostCommand[Any], result: Any) -> None:
        if isinstance(result, ParallmError):
            # It would answer with other weights than the others do.
            logger.error("engine %d cannot catch up: %s: %s", rank, type(action).__name__, result)
            self._members[rank].inbox.put(Stop())

    def _goes_on_after(self, rank: int, cause: BaseException) -> bool:
        """Note the death of an engine; return True if it is to be started anew."""
        with self._lock:
            member = self._members[rank]
            was_serving, member.is_serving, member.has_loaded = member.is_serving, False, False
            member.inbox = queue.SimpleQueue()
            if self._is_stopping.is_set():
                return False
            if not self._is_started or not any(other.is_serving for other in self._members):
                self._cause = self._cause or cause
                self._starts.put(None)
                self._on_end()
                return False
            logger.error("engine %d died; it is started anew", rank, exc_info=cause)
            if was_serving:
                self._hand_over(rank)
            delay_s = self._restart_delay_s(member.num_deaths)
            member.num_deaths += 1
        return not self._is_stopping.wait(delay_s)

    def _hand_over(self, rank: int) -> None:
        """Let other engines begin what a dead one has given no token of, and end the rest."""
        anew, lost = self._router.on_death(rank)
        for request_id in anew:
            self._send(request_id, self._router.place_anew(request_id))
        error = EngineDeadError("The engine that computed this request died.")
        for request_id in lost:
            self._forget(request_id)
        self._deliver([ErrorEvent(request_id=request_id, error=error) for request_id in lost])
        for gathering in list(self._gatherings):
            gathering.drop(rank)
            self._end_if_complete(gathering)

    def _send(self, request_id: str, rank: int) -> None:
        reply = partial(self._admitted, request_id, rank)
        command = self._open[request_id].command
        self._members[rank].inbox.put(replace(command, reply=reply))

    def _admitted(self, request_id: str, rank: int, refusal: ParallmError | None) -> None:
        """Give the caller its reply, or the reader an error if the caller has had a reply."""
        with self._lock:
            request = self._open.get(request_id)
            placed = self._router.placements.get(request_id)
            if request is None or placed is None or placed.rank != rank:
                return
            was_admitted, request.is_admitted = request.is_admitted, True
            if refusal is not None:
                self._forget(request_id)
        if not was_admitted:
            request.command.reply(refusal)
        elif refusal is not None:
            self._deliver([ErrorEvent(request_id=request_id, error=refusal)])

    def _replied(self, gathering: Gathering, rank: int, result: Any) -> None:
        with self._lock:
            gathering.add(rank, result)
            self._end_if_complete(gathering)

    def _end_if_complete(self, gathering: Gathering) -> None:
        if not gathering.is_complete or gathering not in self._gatherings:
            return
        self._gatherings.remove(gathering)
        result = gathering.result()
        if not isinstance(result, ParallmError):
            self._journal.note(gathering.command.action, result)
        gathering.command.reply(result)
        self._join_if_settled()

    def _take(self, rank: int, events: Sequence[Event]) -> None:
        """Pass on the events of an engine, but for those of requests that were moved away."""
        with self._lock:
            self._members[rank].num_deaths = 0
            current = [event for event in events if self._count(rank, event)]
            self._move_waiting()
        if current:
            self._deliver(current)

    def _count(self, rank: int, event: Event) -> bool:
        request_id = event.request_id
        is_shown = self._router.on_event(request_id, rank, event.num_tokens, event.ends)
        if request_id not in self._router.placements:
            self._open.pop(request_id, None)
        return is_shown

    def _move_waiting(self) -> None:
        """Let an engine that has nothing to do begin what waits at another."""
        while (move := self._router.next_move()) is not None:
            self._members[move.source].inbox.put(Abort(request_id=move.request_id))
            self._router.move(move)
            self._send(move.request_id, move.target)

    def _forget(self, request_id: str) -> None:
        self._router.remove(request_id)
        self._open.pop(request_id, None)


def _restart_delay_s(num_deaths: int) -> float:
    """Return no delay after the first death, then one second, and twice as much each time."""
    return min(2.0 ** (num_deaths - 1), MAX_RESTART_DELAY_S) if num_deaths else 0.0
