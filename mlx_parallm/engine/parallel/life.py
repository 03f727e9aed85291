"""A life of several engines that serve the same models, as if they were one.

Every engine has a life of its own, in a process or on a thread. A request goes to the engine that
the router chooses; a command that changes state goes to all of them, in the order in which it came.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from mlx_parallm.engine.commands import Abort, Call, Command, Stop, Submit
from mlx_parallm.engine.engine_commands import PrepareUpdate
from mlx_parallm.engine.life import Deliver, EngineLife, OnLoaded
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.models import EngineState
from mlx_parallm.engine.parallel.asking import SharedAsk
from mlx_parallm.engine.parallel.fleet import Fleet
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.engine.status import Readiness, StateQuery
from mlx_parallm.models.checkpoints.copies import copy_of
from mlx_parallm.types.errors import EngineDeadError, ParallmError

T = TypeVar("T")


class ParallelLife(EngineLife):
    """Implements ``EngineLife`` by the lives of several engines.

    An engine that dies is started anew while the others serve. If all are dead at the same time,
    this life has ended too, unless some are on other machines: then it waits for the first of them.
    """

    def __init__(
        self,
        lives: Sequence[EngineLife],
        make_router: Callable[[], Router],
        *,
        ask: SharedAsk | None = None,
        seed: int = 0,
        read_free_bytes: Callable[[], int | None] = lambda: None,
        are_elsewhere: bool = False,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            lives: one for each engine; all load the same models.
            make_router: returns a router for that many engines, which have nothing to do.
            ask: asks any of these engines; None makes one.
            seed: draws the seeds of requests without one.
            read_free_bytes: see ``Fleet``.
            are_elsewhere: True if engines are on other machines: these take weights from folders
                only if they are as on this machine, and all may be cut off for a moment.
        """
        self._are_elsewhere = are_elsewhere
        self._read_free_bytes = read_free_bytes
        self._seed = seed
        self._lives = lives
        self._make_router = make_router
        self._ask = ask or SharedAsk()
        self._ask.engines = [life.ask for life in lives]
        self._ask.count_live = self._count_live
        # The engines while they live.
        self._fleet: Fleet | None = None
        # Set once they are to end, or the last of them has died.
        self._has_ended = threading.Event()

    @override
    def put(self, command: Command) -> None:
        fleet = self._fleet
        if isinstance(command, Stop):
            self._has_ended.set()
        elif fleet is None or not fleet.is_started:
            if not isinstance(command, Abort):
                command.reply(EngineDeadError("No engine is loaded."))
        elif isinstance(command, Submit):
            fleet.submit(command)
        elif isinstance(command, Abort):
            fleet.abort(command)
        else:
            fleet.call(compared(command) if self._are_elsewhere else command)

    @override
    def clear(self) -> None:
        self._has_ended.clear()

    @override
    def run(self, deliver: Deliver, on_loaded: OnLoaded) -> None:
        fleet = self._fleet = Fleet(
            self._lives,
            self._make_router(),
            deliver,
            self._has_ended.set,
            seed=self._seed,
            read_free_bytes=self._read_free_bytes,
            outlives_engines=self._are_elsewhere,
        )
        fleet.start()
        try:
            on_loaded(fleet.wait_until_loaded())
            self._has_ended.wait()
        finally:
            self._fleet = None
            fleet.stop()
        fleet.check()

    @override
    async def query(self, ask: StateQuery[T]) -> T:
        """The engines' answers become one."""
        answers = await asyncio.gather(
            *(life.query(ask) for life in self._lives), return_exceptions=True
        )
        known: list[T | ParallmError] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ParallmError):
                raise answer
            known.append(answer)
        return ask.together(known)

    @override
    def ask(self, question: Callable[[EngineState], Any], key: Hashable = None) -> Future[Any]:
        return self._ask(question, key=key)

    @override
    def ask_each(self, question: Callable[[EngineState], Any]) -> Sequence[Future[Any]]:
        answers: list[Future[Any]] = []
        for life in self._lives:
            with suppress(EngineDeadError):
                answers.append(life.ask(question))
        if not answers:
            raise EngineDeadError("No engine is loaded.")
        return answers

    @override
    def readiness(self) -> Sequence[Readiness]:
        fleet = self._fleet
        return [Readiness.STARTING] * len(self._lives) if fleet is None else fleet.readiness()

    def _count_live(self) -> int:
        """Return how many engines answer questions; a silent one may be dead soon."""
        absent = (Readiness.STARTING, Readiness.SILENT)
        return sum(each not in absent for each in self.readiness())

    @override
    def steps_s(self) -> Sequence[float]:
        return [step_s for life in self._lives for step_s in life.steps_s()]

    @override
    def stop_within(self, timeout_s: float) -> None:
        for life in self._lives:
            life.stop_within(timeout_s)

    @override
    def end(self) -> None:
        """Each engine's thread does that itself."""


def compared(command: Call) -> Call:
    """Return a command that has engines compare the folder, if it prepares weights of one."""
    match command.action:
        case PrepareUpdate(_, WeightsUpdate(folder=Path() as folder) as update) as action:
            update = replace(update, copy=copy_of(str(folder)))
            return replace(command, action=replace(action, update=update))
        case _:
            return command
