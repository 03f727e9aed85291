"""The server's side of engines in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.commands import Abort, Call, Command, Stop, Submit
from mlx_parallm.engine.kind import StartedModel, TellProgress
from mlx_parallm.engine.life import QUERY_TIMEOUT_S, Deliver, EngineLife, OnLoaded
from mlx_parallm.engine.models import Ask, EngineState
from mlx_parallm.engine.status import Readiness, StateQuery
from mlx_parallm.engine.thread_streams import free_streams
from mlx_parallm.peers.channel import (
    KEEPS_COPIES,
    Channel,
    Packed,
    SharedFile,
    UnreadableError,
    pack,
    pack_shared,
)
from mlx_parallm.peers.messages import (
    Beat,
    Events,
    Failed,
    LoadProgress,
    Query,
    Ready,
    Reply,
    StartEngines,
    Withdraw,
    copies_of,
    find_remote_code,
)
from mlx_parallm.peers.origins import EnginePeer, Origin
from mlx_parallm.peers.replies import Replies
from mlx_parallm.peers.silence import CHECKS, SILENCE_TIMEOUT_S, Pulse, beat, watched
from mlx_parallm.types.errors import (
    ConfigError,
    EngineDeadError,
    EngineSilentError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# START_TIMEOUT_S: most seconds of silence while a process starts and may not be able to beat.
# See ``Pulse``.
START_TIMEOUT_S = 600.0
# DIALLED_TIMEOUT_S: the same of a process on another machine, which sends ``Starting`` until then.
DIALLED_TIMEOUT_S = SILENCE_TIMEOUT_S


class RemoteLife(EngineLife):
    """Implements ``EngineLife``: every life has a process, which ends with this one."""

    def __init__(
        self,
        config: EngineConfig,
        origin: Origin,
        on_progress: TellProgress,
        *,
        ask: Ask | None = None,
        rank: int = 0,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
        query_timeout_s: float = QUERY_TIMEOUT_S,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            config: what to load.
            origin: makes the process of each life.
            on_progress: hears of the load.
            ask: asks any of several engines of the same models, for its models; None asks this
                one.
            rank: the engine's number among several, for messages.
            silence_timeout_s: see ``SILENCE_TIMEOUT_S``; a world of ranks has a timeout of its
                own.
            query_timeout_s: see ``QUERY_TIMEOUT_S``.
        """
        self._config = config
        self._origin = origin
        self._ask_for_models: Ask = ask or self.ask
        self._on_progress = on_progress
        self._lock = threading.Lock()
        # Commands and queries, which a thread sends while a process serves; None ends that.
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_serving = False
        # The channel to a process that loads.
        self._loading: Channel | None = None
        self._rank = rank
        ranks = config.ranks
        self._silence_timeout_s = ranks.timeout_s if ranks.size > 1 else silence_timeout_s
        self._query_timeout_s = query_timeout_s
        self._pulse = self._new_pulse()
        # The process while there is one, and what kills it unless it ends before.
        self._deadline: _Deadline | None = None
        find_remote_code(config)

    @override
    def put(self, command: Command) -> None:
        self._outbox.put(command)

    @override
    def clear(self) -> None:
        while not self._outbox.empty():
            self._outbox.get()

    @override
    def run(self, deliver: Deliver, on_loaded: OnLoaded) -> None:
        with self._origin.open() as peer, self._guarded(peer) as deadline:
            link, has_loaded = Link(peer.channel), False
            try:
                loaded = self._load(peer)
                has_loaded = True
                with self._sending(link, peer.channel):
                    on_loaded(loaded)
                    _receive(peer.channel, link, self._pulse, deliver)
            except (EOFError, OSError):
                if not (link.is_ending or (has_loaded and deadline.is_set)):
                    raise EngineDeadError(peer.last_words()) from None

    @override
    async def query(self, ask: StateQuery[T]) -> T:
        answer = asyncio.wrap_future(self.ask(ask))
        try:
            return await asyncio.wait_for(answer, self._query_timeout_s)
        except TimeoutError:
            message = f"Engine {self._rank} has not answered within {self._query_timeout_s:g} s."
            self._pulse.report_silence(message)
            raise EngineSilentError(message) from None

    @override
    def readiness(self) -> Sequence[Readiness]:
        with self._lock:
            if not self._is_serving:
                return [Readiness.STARTING]
        return [Readiness.SILENT if self._pulse.is_weak else Readiness.READY]

    @override
    def steps_s(self) -> Sequence[float]:
        """By the latest beat."""
        return [self._pulse.step_s]

    @override
    def stop_within(self, timeout_s: float) -> None:
        with self._lock:
            if self._loading is not None:
                self._loading.hang_up()
            if self._deadline is not None:
                self._deadline.set(timeout_s)

    @override
    def end(self) -> None:
        free_streams()

    @override
    def ask(self, question: Callable[[EngineState], Any], key: Hashable = None) -> Future[Any]:
        del key
        query = PendingQuery(question)
        with self._lock:
            if not self._is_serving:
                raise EngineDeadError("No engine is loaded.")
            self._outbox.put(query)
        query.answer.add_done_callback(lambda done: done.cancelled() and self._withdraw(query))
        return query.answer

    def _withdraw(self, query: PendingQuery) -> None:
        with self._lock:
            if self._is_serving:
                self._outbox.put(WithdrawnQuery(query))

    def _load(self, peer: EnginePeer) -> Sequence[StartedModel]:
        channel = peer.channel
        with self._lock:
            self._loading = channel
        try:
            copies = copies_of(self._config) if peer.is_elsewhere else ()
            channel.send(StartEngines(self._config, self._silence_timeout_s, copies))
            if peer.is_elsewhere:
                beat(self._silence_timeout_s, lambda: channel.send(Beat()))
            while True:
                match self._pulse.receive(channel)[0]:
                    case LoadProgress(text, fraction):
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

    def _new_pulse(self, *, is_elsewhere: bool = False) -> Pulse:
        ranks = self._config.ranks
        timeout_s = DIALLED_TIMEOUT_S if is_elsewhere else START_TIMEOUT_S
        timeout_s += ranks.join_timeout_s if ranks.size > 1 else 0.0
        start_checks = max(CHECKS, math.ceil(CHECKS * timeout_s / self._silence_timeout_s))
        return Pulse(start_checks, Ready if ranks.size > 1 else Beat)

    @contextlib.contextmanager
    def _guarded(self, peer: EnginePeer) -> Generator[_Deadline]:
        """Kill a process that is silent for too long, or does not end in time."""
        pulse = self._new_pulse(is_elsewhere=peer.is_elsewhere)

        def kill(why: str) -> None:
            logger.critical("engine %d %s; %s is killed", self._rank, why, peer.name)
            peer.kill()
            # A process that waits for a device may not die, and would keep its end open.
            peer.channel.hang_up()

        def kill_silent() -> None:
            silent_s = self._silence_timeout_s * pulse.limit / CHECKS
            kill(f"has been silent for {silent_s:g} s")

        deadline = _Deadline(lambda: kill("does not end"))
        with self._lock:
            self._pulse, self._deadline = pulse, deadline
        try:
            with watched(pulse.silence, self._silence_timeout_s, kill_silent, lambda: pulse.limit):
                yield deadline
        finally:
            with self._lock:
                self._pulse, self._deadline = self._new_pulse(), None
            deadline.cancel()

    @contextlib.contextmanager
    def _sending(self, link: Link, channel: Channel) -> Generator[None]:
        """Send what is put into the outbox while the block runs."""
        sender = threading.Thread(
            target=_forward, args=(self._outbox, link, channel), name="commands", daemon=True
        )
        sender.start()
        with self._lock:
            self._is_serving = True
        try:
            yield
        finally:
            channel.hang_up()
            with self._lock:
                self._is_serving = False
                self._outbox.put(None)
            sender.join()
            link.fail()


class _Deadline:
    """Calls ``on_over`` on a thread of its own once a timeout is over, unless it is cancelled.

    Attributes:
        is_set: True once there is a timeout.
    """

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._on_over = on_over
        self._timer: threading.Timer | None = None
        self._over_s = math.inf
        self.is_set = False

    def set(self, timeout_s: float) -> None:
        """Begin a timeout, if it is over earlier than the one that has begun."""
        over_s = time.monotonic() + timeout_s
        if over_s >= self._over_s:
            return
        self.cancel()
        self._over_s, self.is_set = over_s, True
        self._timer = threading.Timer(timeout_s, self._on_over)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Call nothing."""
        if self._timer is not None:
            self._timer.cancel()


def _forward(outbox: queue.SimpleQueue[Any], link: Link, channel: Channel) -> None:
    """Send what is put into the outbox, up to the first None."""
    while (message := outbox.get()) is not None:
        try:
            link.send(message)
        except OSError:
            # The message may be half sent, so the other end could not read the next one.
            channel.hang_up()
        # An upload's tensors would be kept until the next message.
        del message


def _receive(channel: Channel, link: Link, pulse: Pulse, deliver: Deliver) -> None:
    """Pass on what the engines send, until they are gone (EOFError) or send why they died."""
    while True:
        try:
            message, number = pulse.receive(channel)
        except UnreadableError as problem:
            logger.exception("a reply cannot be read")
            link.settle(problem.number, problem)
            continue
        match message:
            case Events():
                deliver(message.events)
            case Reply(value):
                link.settle(number, value)
            case Failed(error):
                raise error
            case other:
                raise AssertionError(other)


class PendingQuery:
    """A query of the engines' state, and the future of its answer."""

    def __init__(self, ask: Callable[[EngineState], Any]) -> None:
        self.ask = ask
        self.answer: Future[Any] = Future()
        self.number = 0


class WithdrawnQuery:
    """A query whose caller was cancelled."""

    def __init__(self, query: PendingQuery) -> None:
        self.query = query


class Link:
    """The channel to one process, for as long as it lives.

    One thread sends, and the one that receives settles.

    Attributes:
        is_ending: True if the process was asked to stop.
    """

    def __init__(self, channel: Channel, *, keeps_copies: bool = KEEPS_COPIES) -> None:
        """Begin; ``keeps_copies``: a file stays open here until the reply to its message."""
        self._channel = channel
        self._keeps_copies = keeps_copies
        self._replies = Replies()
        self._files: dict[int, SharedFile] = {}
        self.is_ending = False

    def send(self, message: Command | PendingQuery | WithdrawnQuery) -> None:
        """Send a command or a query; raise OSError if the process is gone."""
        if isinstance(message, PendingQuery):
            query = partial(pack, Query(message.ask))
            message.number = self._replies.ask(message.answer, query, self._send)
        elif isinstance(message, WithdrawnQuery):
            self._replies.forget(message.query.number)
            self._channel.send(Withdraw(), message.query.number)
        elif isinstance(message, Abort | Stop):
            self.is_ending = self.is_ending or isinstance(message, Stop)
            self._channel.send(message)
        else:
            self._replies.ask(message.reply, partial(_packed, message), self._send)

    def settle(self, number: int, value: Any) -> None:
        """Give the result of the command or query of this number to its caller."""
        self._files.pop(number, None)
        self._replies.settle(number, value)

    def fail(self) -> None:
        """Fail the queries, because the process is gone. Commands are failed by the mailbox."""
        self._replies.fail(EngineDeadError("The engine's process has ended."))

    def _send(self, message: Packed, number: int) -> None:
        if self._keeps_copies and message.file is not None:
            self._files[number] = message.file
        self._channel.send_packed(message, number)


def _packed(command: Submit | Call) -> Packed:
    """Return what is sent of a command: the same for all engines that are given it."""
    if isinstance(command, Call) and command.packed is not None:
        bare = Call(action=command.action, reply=_ignore)
        return command.packed.get(partial(pack_shared, bare))
    return pack(replace(command, reply=_ignore))


def _ignore(_: Any) -> None:
    """In place of a reply, which cannot be sent."""
