"""The engines' process: loads, serves the commands that come in, and sends back what they give."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.build import build_engines
from mlx_parallm.engine.commands import Abort, Command, Stop
from mlx_parallm.engine.life import Build, Loaded, LocalLife
from mlx_parallm.engine.remote.channel import PICKLE_ERRORS, Channel
from mlx_parallm.engine.remote.events import pack_events
from mlx_parallm.engine.remote.messages import (
    Events,
    Failed,
    Numbered,
    Progress,
    Query,
    Ready,
    Reply,
    Start,
)
from mlx_parallm.engine.remote.models import PackedModel
from mlx_parallm.errors import ConfigError, ControlError, EngineDeadError, ParallmError
from mlx_parallm.outputs import GenerateEvent

logger = logging.getLogger(__name__)

# Of a process whose server is gone.
ORPHANED = 3


def serve_engines(channel: Channel, build: Build = build_engines) -> int:
    """Be the engines' process until ``Stop``; the exit code. The calling thread owns MLX."""
    start = channel.receive()
    assert isinstance(start, Start)
    return _Host(channel, start.config, build).run()


class _Host:
    def __init__(self, channel: Channel, config: EngineConfig, build: Build) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._life = LocalLife(config, build, lambda *told: channel.send(Progress(*told)))

    def run(self) -> int:
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        try:
            self._life.run(self._inbox, self._deliver, self._on_loaded)
        except BaseException as cause:
            if not isinstance(cause, ParallmError):
                logger.exception("the engine's process died")
            self._send_failure(cause)
            return 1
        finally:
            self._life.end()
        return 0

    def _on_loaded(self, loaded: Loaded) -> None:
        ready = Ready([PackedModel.of(one) for one in loaded.models], loaded.encoders)
        try:
            self._channel.send(ready)
        except PICKLE_ERRORS as cause:
            raise ConfigError(
                f"--engine-process: a tokenizer cannot be handed to another process: {cause}"
            ) from cause

    def _deliver(self, events: list[GenerateEvent]) -> None:
        self._channel.send(Events(pack_events(events)))

    def _send_failure(self, cause: BaseException) -> None:
        try:
            self._channel.send(Failed(cause))
        except PICKLE_ERRORS:
            self._channel.send(Failed(EngineDeadError(f"{type(cause).__name__}: {cause}")))

    def _read(self) -> None:
        """On a thread of its own: take messages until the server is gone, and end then."""
        while True:
            try:
                message = self._channel.receive()
            except EOFError:
                os._exit(ORPHANED)
            match message:
                case Numbered(number, command) if not isinstance(command, Abort | Stop):
                    reply = partial(self._reply, number)
                    self._inbox.put(replace(command, reply=reply))
                case Numbered(_, command):
                    self._inbox.put(command)
                case Query(number, ask):
                    self._answer(number, lambda: self._life.ask(ask))
                case _:
                    raise AssertionError(message)

    def _answer(self, number: int, ask: Callable[[], Any]) -> None:
        try:
            value = ask()
        except ParallmError as refusal:
            value = refusal
        except Exception as cause:
            logger.exception("a query failed")
            value = ControlError(f"{type(cause).__name__}: {cause}")
        if isinstance(value, Future):
            value.add_done_callback(lambda done: self._answer(number, done.result))
        else:
            self._reply(number, value)

    def _reply(self, number: int, value: Any) -> None:
        try:
            self._channel.send(Reply(number, value))
        except PICKLE_ERRORS as cause:
            logger.exception("a reply cannot be sent")
            self._channel.send(Reply(number, ControlError(f"{type(cause).__name__}: {cause}")))
