"""The server's side of engines in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, TypeVar

from mlx_parallm.channel import Channel, UnreadableError
from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.commands import Command
from mlx_parallm.engine.interface import Ask, Readiness, StartedModel, TellProgress
from mlx_parallm.engine.life import Deliver, OnLoaded
from mlx_parallm.engine.remote.events import unpack_events
from mlx_parallm.engine.remote.link import Link, PendingQuery, WithdrawnQuery
from mlx_parallm.engine.remote.messages import (
    Beat,
    Events,
    Failed,
    Progress,
    Ready,
    Reply,
    Start,
)
from mlx_parallm.engine.remote.remote_code import find_remote_code
from mlx_parallm.engine.remote.silence import Silence, watched
from mlx_parallm.engine.state import EngineState, StateQuery
from mlx_parallm.engine.thread_streams import free_streams
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.types.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: ``IGNORED_SIGNALS``: a signal to the whole process group is meant for the server, which drains
#: before it stops its engines. SIGHUP comes from a terminal that is gone, or an ssh connection.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# END_TIMEOUT_S and DEATH_TIMEOUT_S: grace period before SIGKILL, after a requested stop and after a
# crash.
END_TIMEOUT_S, DEATH_TIMEOUT_S = 30.0, 1.0


class RemoteLife:
    """Implements ``EngineLife``: every life is a process, which ends with this one."""

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str],
        on_progress: TellProgress,
        environment: Mapping[str, str] | None = None,
        *,
        ask: Ask | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            config: what to load.
            command: starts a process that calls ``serve_engines`` with a channel over the socket
                whose descriptor is its last argument.
            on_progress: hears of the load.
            environment: variables of the process, besides this one's.
            ask: asks any of several engines of the same models, for its models; None asks this
                one.
        """
        self._config = config
        self._command = command
        self._environment = environment or {}
        self._ask_for_models: Ask = ask or self.ask
        self._on_progress = on_progress
        self._lock = threading.Lock()
        # The commands that wait for the thread that sends them; None while there is no such thread.
        self._outbox: queue.SimpleQueue[Any] | None = None
        # The channel to a process that loads.
        self._loading: Channel | None = None
        find_remote_code(config)

    def run(
        self,
        inbox: queue.SimpleQueue[Command],
        deliver: Deliver,
        on_loaded: OnLoaded,
    ) -> None:
        """See ``EngineLife.run``."""
        gc.unfreeze()
        with _spawned(self._command, self._environment) as (process, channel):
            link, silence = Link(channel), Silence()
            try:
                loaded = self._load(channel)
                spare_garbage_collection()
                with self._sending(inbox, link, channel), self._watched(silence, process):
                    on_loaded(loaded)
                    _receive(channel, link, silence, deliver)
            except (EOFError, OSError):
                if not link.is_ending:
                    raise EngineDeadError(_last_words(process)) from None

    async def query(self, ask: StateQuery[T]) -> T:
        """See ``EngineLife.query``."""
        return await asyncio.wrap_future(self.ask(ask))

    def readiness(self) -> Sequence[Readiness]:
        """See ``EngineLife.readiness``."""
        with self._lock:
            return [Readiness.STARTING if self._outbox is None else Readiness.READY]

    def give_up_load(self) -> None:
        """See ``EngineLife.give_up_load``."""
        with self._lock:
            if self._loading is not None:
                self._loading.hang_up()

    def end(self) -> None:
        """See ``EngineLife.end``."""
        free_streams()

    def ask(self, question: Callable[[EngineState], Any], key: Hashable = None) -> Future[Any]:
        """See ``EngineLife.ask``."""
        del key
        query = PendingQuery(question)
        with self._lock:
            if self._outbox is None:
                raise EngineDeadError("No engine is loaded.")
            self._outbox.put(query)
        query.answer.add_done_callback(lambda done: done.cancelled() and self._withdraw(query))
        return query.answer

    def _withdraw(self, query: PendingQuery) -> None:
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(WithdrawnQuery(query))

    def _load(self, channel: Channel) -> Sequence[StartedModel]:
        with self._lock:
            self._loading = channel
        try:
            channel.send(Start(self._config))
            while True:
                match channel.receive()[0]:
                    case Progress(text, fraction):
                        self._on_progress(text, fraction)
                    case Failed(error):
                        raise error
                    case Ready(models):
                        return [
                            StartedModel(config, model.unpack(self._ask_for_models), is_loaded)
                            for config, model, is_loaded in models
                        ]
                    case other:
                        raise AssertionError(other)
        except UnreadableError as problem:
            raise ConfigError(f"--engine-process: {problem}") from problem
        finally:
            with self._lock:
                self._loading = None

    def _watched(
        self, silence: Silence, process: subprocess.Popen[bytes]
    ) -> contextlib.AbstractContextManager[None]:
        """Kill a process that computes with other ranks, if it says nothing for their timeout."""
        ranks = self._config.ranks
        if ranks.size == 1:
            return contextlib.nullcontext()

        def kill() -> None:
            logger.critical("the engine's process has been silent for %g s", ranks.timeout_s)
            process.kill()

        return watched(silence, ranks.timeout_s, kill)

    @contextlib.contextmanager
    def _sending(
        self, inbox: queue.SimpleQueue[Any], link: Link, channel: Channel
    ) -> Generator[None]:
        """Send what is put into the inbox while the block runs."""
        sender = threading.Thread(
            target=_forward, args=(inbox, link, channel), name="commands", daemon=True
        )
        sender.start()
        with self._lock:
            self._outbox = inbox
        try:
            yield
        finally:
            channel.hang_up()
            with self._lock:
                self._outbox = None
                inbox.put(None)
            sender.join()
            link.fail()


@contextlib.contextmanager
def _spawned(
    command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> Generator[tuple[subprocess.Popen[bytes], Channel]]:
    """Start a process, and yield it and the channel to it; it has ended when the block has."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_process(command, [theirs], environment)
    channel = Channel(ours)
    patience_s = DEATH_TIMEOUT_S
    try:
        yield process, channel
        patience_s = END_TIMEOUT_S
    finally:
        channel.close()
        _end(process, patience_s)


def start_process(
    command: Sequence[str],
    ends: Sequence[socket.socket],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start a process of this server, which ignores signals to the process group.

    Args:
        command: the arguments before the descriptors.
        ends: sockets whose descriptors it gets.
        environment: variables besides those of this process.
    """
    # Modules are found where this process finds them, and nowhere else first.
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    descriptors = [end.fileno() for end in ends]
    # The signals are blocked until the process ignores them; it inherits the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(
            [*command, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={**os.environ, **environment, "PYTHONPATH": path},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore signals to the process group, in a process from ``start_process``."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for the end of a process that has hung up; kill it after ``patience_s``."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the engine's process %d does not end", process.pid)


def _last_words(process: subprocess.Popen[bytes]) -> str:
    try:
        return f"The engine's process ended with {process.wait(DEATH_TIMEOUT_S)}."
    except subprocess.TimeoutExpired:
        return "The engine's process hung up."


def _forward(inbox: queue.SimpleQueue[Any], link: Link, channel: Channel) -> None:
    """Send the commands that come in, up to the first None."""
    while (message := inbox.get()) is not None:
        try:
            link.send(message)
        except OSError:
            # The message may be half sent, so the other end could not read the next one.
            channel.hang_up()


def _receive(channel: Channel, link: Link, silence: Silence, deliver: Deliver) -> None:
    """Pass on what the engines send, until they are gone (EOFError) or send why they died."""
    while True:
        silence.begin()
        try:
            message, number = channel.receive()
        except UnreadableError as problem:
            logger.exception("a reply cannot be read")
            link.settle(problem.number, problem)
            continue
        silence.end()
        match message:
            case Beat():
                pass
            case Events(packed):
                deliver(unpack_events(packed))
            case Reply(value):
                link.settle(number, value)
            case Failed(error):
                raise error
            case other:
                raise AssertionError(other)
