"""The server's side of engines in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.commands import Command
from mlx_parallm.engine.life import Deliver, Loaded, TellProgress
from mlx_parallm.engine.remote.channel import Channel
from mlx_parallm.engine.remote.events import unpack_events
from mlx_parallm.engine.remote.link import Asked, Link
from mlx_parallm.engine.remote.messages import Events, Failed, Progress, Ready, Reply, Start
from mlx_parallm.engine.state import EngineState
from mlx_parallm.errors import EngineDeadError

T = TypeVar("T")

# Of a process that has hung up.
END_TIMEOUT_S = 30.0


class _DeathError(Exception):
    """The engines have told what they die of."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


class RemoteLife:
    """Implements ``EngineLife``: every life is a process, which ends with this one."""

    def __init__(
        self, config: EngineConfig, command: Sequence[str], on_progress: TellProgress
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            config: what to load.
            command: starts a process that calls ``serve_engines`` with a channel over the socket
                whose descriptor is its last argument.
            on_progress: hears of the load.
        """
        self._config = config
        self._command = command
        self._on_progress = on_progress
        # Where commands wait for the thread that sends them; None while nobody does.
        self._outbox: queue.SimpleQueue[Any] | None = None

    def run(
        self,
        inbox: queue.SimpleQueue[Command],
        deliver: Deliver,
        on_loaded: Callable[[Loaded], None],
    ) -> None:
        """See ``EngineLife.run``."""
        gc.unfreeze()
        with _spawned(self._command) as (process, channel):
            link = Link(channel)
            try:
                channel.send(Start(self._config))
                on_loaded(self._load(channel))
                # Nothing that is there now becomes garbage while requests are answered.
                gc.collect()
                gc.freeze()
                with self._sending(inbox, link):
                    _receive(channel, link, deliver)
            except _DeathError as told:
                raise told.cause from None
            except (EOFError, OSError):
                if not link.is_ending:
                    code = process.wait(END_TIMEOUT_S)
                    raise EngineDeadError(f"The engine's process ended with {code}.") from None

    async def query(self, ask: Callable[[EngineState], T]) -> T:
        """See ``EngineLife.query``."""
        return await asyncio.wrap_future(self._ask(ask))

    def end(self) -> None:
        """See ``EngineLife.end``."""

    def _ask(self, ask: Callable[[EngineState], Any]) -> Future[Any]:
        """``query`` from any thread."""
        outbox = self._outbox
        if outbox is None:
            raise EngineDeadError("No engine is loaded.")
        asked = Asked(ask)
        outbox.put(asked)
        return asked.answer

    def _load(self, channel: Channel) -> Loaded:
        while not isinstance(message := channel.receive(), Ready):
            if isinstance(message, Failed):
                raise _DeathError(message.error)
            assert isinstance(message, Progress)
            self._on_progress(message.text, message.fraction)
        return Loaded([one.unpack(self._ask) for one in message.models], message.encoders)

    @contextlib.contextmanager
    def _sending(self, inbox: queue.SimpleQueue[Any], link: Link) -> Iterator[None]:
        """Send what is put into the inbox while the block runs."""
        sender = threading.Thread(target=_forward, args=(inbox, link), name="commands", daemon=True)
        sender.start()
        self._outbox = inbox
        try:
            yield
        finally:
            self._outbox = None
            inbox.put(None)
            sender.join()
            link.fail()


@contextlib.contextmanager
def _spawned(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Channel]]:
    """A process and the channel to it; it has ended when the block has."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        process = subprocess.Popen(
            [*command, str(fd)], stdin=subprocess.DEVNULL, pass_fds=[fd], close_fds=True
        )
    channel = Channel(ours)
    try:
        yield process, channel
    finally:
        channel.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _forward(inbox: queue.SimpleQueue[Any], link: Link) -> None:
    """Send what comes in, up to the first None."""
    while (message := inbox.get()) is not None:
        # That the process is gone is found out where its messages are received.
        with contextlib.suppress(OSError):
            link.send(message)


def _receive(channel: Channel, link: Link, deliver: Deliver) -> None:
    """Pass on what the engines send, until they are gone (EOFError) or tell what they died of."""
    while True:
        match channel.receive():
            case Events(packed):
                deliver(unpack_events(packed))
            case Reply(number, value):
                link.settle(number, value)
            case Failed(error):
                raise _DeathError(error)
            case other:
                raise AssertionError(other)
