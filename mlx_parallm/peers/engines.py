"""The engines' process: it loads, carries out the commands, and sends their results."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

from mlx_parallm.engine.commands import Abort, Stop
from mlx_parallm.engine.kind import StartedModel
from mlx_parallm.engine.local_life import Build, LocalLife, OpenWorker, nothing_beside, own_worker
from mlx_parallm.engine.models import MakeBeside
from mlx_parallm.models.checkpoints.copies import check_copy
from mlx_parallm.peers.channel import Channel, UnreadableError
from mlx_parallm.peers.messages import (
    Beat,
    Events,
    Failed,
    LoadProgress,
    Query,
    Ready,
    StartEngines,
    Withdraw,
    find_remote_code,
)
from mlx_parallm.peers.replies import send_reply
from mlx_parallm.peers.silence import beat
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.types.errors import ConfigError, ControlError, EngineDeadError, ParallmError
from mlx_parallm.types.work import Event

logger = logging.getLogger(__name__)

# ORPHANED: exit code of a process whose server is gone.
ORPHANED = 3


def serve_engines(
    channel: Channel,
    build: Build,
    beside: MakeBeside = nothing_beside,
    open_worker: OpenWorker = own_worker,
    *,
    is_elsewhere: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Be the engines' process until ``Stop``; return the exit code. This thread owns MLX.

    Args:
        channel: to the server.
        build: makes the engines.
        beside: makes what runs beside them.
        open_worker: makes what computes.
        is_elsewhere: the server is on another machine and beats; the process ends if it is silent.
        on_start: called once the server's settings are here, before the first beat.
    """
    start, _ = channel.receive()
    assert isinstance(start, StartEngines)
    on_start()
    if is_elsewhere:
        channel.limit_silence(start.silence_timeout_s)
    find_remote_code(start.config)
    return _EnginePeer(channel, start, build, beside, open_worker).run()


class _EnginePeer:
    def __init__(
        self,
        channel: Channel,
        start: StartEngines,
        build: Build,
        beside: MakeBeside = nothing_beside,
        open_worker: OpenWorker = own_worker,
    ) -> None:
        self._channel = channel
        self._start = start
        self._life = LocalLife(
            start.config,
            lambda text, share: channel.send(LoadProgress(text, share)),
            build,
            beside,
            open_worker,
        )
        # Pending answers, by the numbers of their queries.
        self._futures: dict[int, Future[Any]] = {}

    def run(self) -> int:
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        self._begin_beats()
        try:
            for copy in self._start.copies:
                check_copy(copy)
            self._life.run(self._deliver, self._on_loaded)
        except ParallmError as refusal:
            self._channel.send(Failed(refusal))
            return 1
        except BaseException as cause:
            logger.exception("the engine's process died")
            # The error itself is not sent, because the server may not know its class.
            self._channel.send(Failed(EngineDeadError(f"{type(cause).__name__}: {cause}")))
            return 1
        finally:
            self._life.end()
        return 0

    def _on_loaded(self, loaded: Sequence[StartedModel]) -> None:
        spare_garbage_collection()
        try:
            models = [
                (started.config, started.model.packed(), started.is_loaded) for started in loaded
            ]
            self._channel.send(Ready(models))
        except ControlError as cause:
            raise ConfigError(
                f"--engine-process: a tokenizer cannot be handed to another process: {cause}"
            ) from cause

    def _begin_beats(self) -> None:
        beat(
            self._start.silence_timeout_s,
            lambda: self._channel.send(Beat(sum(self._life.steps_s()))),
        )

    def _deliver(self, events: Sequence[Event]) -> None:
        self._channel.send(Events(events))

    def _read(self) -> None:
        """On a thread of its own: take messages until the server is gone, and end then."""
        try:
            while True:
                self._take_next()
        except (EOFError, OSError):
            logger.debug("the server's process has ended")
        except BaseException:
            # An engine that gets no more commands must not live on.
            logger.exception("the engine's process cannot read from the server")
        os._exit(ORPHANED)

    def _take_next(self) -> None:
        try:
            message, number = self._channel.receive()
        except UnreadableError as problem:
            logger.exception("a command cannot be read")
            self._reply(problem.number, problem)
            return
        match message:
            case Query(ask):
                self._answer(number, partial(self._life.ask_now, ask))
            case Withdraw():
                future = self._futures.pop(number, None)
                if future is not None:
                    future.cancel()
            case Abort() | Stop():
                self._life.put(message)
            case Beat():
                pass
            case command:
                self._life.put(replace(command, reply=partial(self._reply, number)))

    def _answer(self, number: int, ask: Callable[[], Any]) -> None:
        try:
            value = ask()
        except ParallmError as refusal:
            value = refusal
        except Exception as cause:
            logger.exception("a query failed")
            value = ControlError(f"{type(cause).__name__}: {cause}")
        if isinstance(value, Future):
            future = self._futures[number] = cast("Future[Any]", value)
            future.add_done_callback(partial(self._answer_later, number))
        else:
            self._reply(number, value)

    def _answer_later(self, number: int, done: Future[Any]) -> None:
        self._futures.pop(number, None)
        if not done.cancelled():
            self._answer(number, done.result)

    def _reply(self, number: int, value: Any) -> None:
        send_reply(self._channel.send, number, value)
