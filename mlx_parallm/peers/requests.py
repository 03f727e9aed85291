"""One HTTP process's requests, where the engines are chosen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from mlx_parallm.conversations.records import KeepsChats
from mlx_parallm.engine.commands import Abort
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.models import EngineState, ServedModel
from mlx_parallm.engine.status import CheckRoom
from mlx_parallm.peers.channel import Packed, UnreadableError, pack
from mlx_parallm.peers.messages import (
    Catalog,
    Events,
    KeepChat,
    Known,
    KnownModel,
    Open,
    Query,
    SetTtl,
    Wait,
)
from mlx_parallm.peers.replies import send_reply
from mlx_parallm.peers.wire import Wire
from mlx_parallm.types.errors import EngineDeadError, ParallmError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.work import Ends, Event

logger = logging.getLogger(__name__)


class Shared(Protocol):
    """State that the applications of several processes share; one of them changes it."""

    @property
    def number(self) -> int:
        """Grows with every change."""
        ...

    def value(self) -> Any:
        """Return it in a form that can be pickled."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A model as it is sent; ``model`` is kept, so that another one is not taken for it."""

    number: int
    model: ServedModel
    packed: Packed


@dataclass(frozen=True, slots=True)
class PackedCatalog:
    """A catalog as it is sent, and the models in it."""

    packed: Packed
    models: Sequence[_Sent]


class Catalogs:
    """The models, adapters and versions as they are now, pickled once for all HTTP processes.

    Lives on the event loop.
    """

    def __init__(self, core: EngineCore, shared: Shared) -> None:
        """Begin without a catalog; ``shared`` is what applications share."""
        self._core = core
        self._shared = shared
        self._numbers = count(1)
        self._seen: tuple[Any, ...] = ()
        self._latest: PackedCatalog | None = None

    def latest(self) -> PackedCatalog:
        """Return the catalog: the same object while nothing changes.

        Raises:
            ControlError: a model cannot be pickled.
        """
        control, names = self._core.control, self._core.control.names
        # Each flush of events asks, so statuses are not made to be compared.
        number = self._core.directory.number
        seen = (number, names.known, names.kept, control.versions, self._shared.number)
        if self._latest is None or seen != self._seen:
            statuses = self._core.statuses()
            models = [self._sent(status.model) for status in statuses]
            rows = [
                (replace(status, model=None), None if model is None else model.number)
                for status, model in zip(statuses, models, strict=True)
            ]
            shared = self._shared.value()
            packed = pack(Catalog(rows, names.known, names.kept, control.versions, shared))
            self._latest = PackedCatalog(packed, [each for each in models if each is not None])
            self._seen = seen
        return self._latest

    def _sent(self, model: ServedModel | None) -> _Sent | None:
        if model is None:
            return None
        for known in () if self._latest is None else self._latest.models:
            if known.model is model:
                return known
        number = next(self._numbers)
        return _Sent(number, model, pack(KnownModel(number, model.packed())))


class HttpPeer:
    """Carries out the requests of one HTTP process. Lives on the event loop."""

    def __init__(
        self,
        core: EngineCore,
        wire: Wire,
        catalogs: Catalogs,
        keep_chat: KeepsChats | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            core: the engines.
            wire: to the HTTP process.
            catalogs: what HTTP processes know.
            keep_chat: stores chats; None: none are stored.
        """
        self._keep_chat = keep_chat
        self._core = core
        self._wire = wire
        self._catalogs = catalogs
        self._open: dict[str, ForwardingReader] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._events: list[Event] = []
        self._sent: PackedCatalog | None = None
        self._numbers = count(1)
        self._acknowledged: dict[int, asyncio.Future[None]] = {}
        self._is_gone = False

    def take(self, message: Any, number: int) -> bool:
        """Take a message of the HTTP process; False if it is not about requests."""
        match message:
            case Open(request):
                task = self._begin(
                    number, self._admit(message), sends_none=not message.has_one_event
                )
                self._tasks[request.request_id] = task
                task.add_done_callback(lambda _: self._tasks.pop(request.request_id, None))
            case Abort(request_id=request_id):
                self._abort(message, request_id)
            case SetTtl(name, ttl_s):
                self._core.set_ttl(name, ttl_s)
            case CheckRoom() | Wait() | KeepChat() | Query():
                self._begin(number, self._work(message))
            case UnreadableError():
                logger.error("a question of an HTTP process cannot be read", exc_info=message)
                send_reply(self._wire.send, number, message)
            case Known():
                if (known := self._acknowledged.pop(number, None)) is not None:
                    _acknowledge(known)
            case _:
                return False
        return True

    def show(self) -> None:
        """Send the catalog if it has changed."""
        latest = self._catalogs.latest()
        if latest is self._sent or self._is_gone:
            return
        known = () if self._sent is None else self._sent.models
        self._sent = latest
        for model in latest.models:
            if model not in known:
                self._wire.send_packed(model.packed)
        self._wire.send_packed(latest.packed)

    async def settle(self) -> None:
        """Return once the HTTP process has the catalog as it is now, or is gone."""
        self.show()
        number = next(self._numbers)
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._acknowledged[number] = known
        if self._is_gone:
            _acknowledge(known)
        self._wire.send(Known(), number)
        try:
            await known
        finally:
            self._acknowledged.pop(number, None)

    async def leave(self) -> None:
        """End every request of the HTTP process, which is gone."""
        self._is_gone = True
        for known in self._acknowledged.values():
            _acknowledge(known)
        self._acknowledged.clear()
        for task in [*self._tasks.values(), *self._others]:
            task.cancel()
        for request_id in list(self._open):
            await self._core.abort(request_id)
        self._open.clear()

    def _work(self, message: CheckRoom | Wait | KeepChat | Query) -> Coroutine[Any, Any, Any]:
        """Return what a message asks for, whose result is sent."""
        match message:
            case CheckRoom(model, client, n):
                return self._core.check_queue(model, client, n)
            case Wait(name, client):
                return self._core.wait(name, client)
            case KeepChat(chat):
                assert self._keep_chat is not None, "HTTP processes know whether chats are stored"
                return self._keep_chat(chat)
            case Query(question, key):
                return self._ask(question, key)

    async def _ask(self, question: Callable[[EngineState], Any], key: Hashable) -> Any:
        return await asyncio.wrap_future(self._core.ask(question, key=key))

    async def _admit(self, message: Open) -> None:
        request = message.request
        reader = ForwardingReader(message, self._forward)
        self._open[request.request_id] = reader
        try:
            await self._core.open_reader(request, reader)
        except BaseException:
            self._open.pop(request.request_id, None)
            raise

    def _abort(self, message: Abort, request_id: str) -> None:
        if request_id in self._tasks:
            # It waits for its model or adapter, or for its admission.
            self._tasks[request_id].cancel()
        elif message.is_notified:
            self._start(self._core.cancel(request_id))
        else:
            self._open.pop(request_id, None)
            self._start(self._core.abort(request_id))

    def _begin(
        self, number: int, work: Coroutine[Any, Any, Any], *, sends_none: bool = True
    ) -> asyncio.Task[None]:
        task = self._start(self._answer(number, work, sends_none=sends_none))
        # A task that is cancelled at once has not begun its work.
        task.add_done_callback(lambda _: work.close())
        return task

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    async def _answer(self, number: int, work: Any, *, sends_none: bool) -> None:
        """Send the result of ``work``, or its error; a result of None only if it ``sends_none``."""
        try:
            value = await work
        except ParallmError as refusal:
            value = refusal
        except asyncio.CancelledError:
            return
        except Exception:
            logger.exception("a question of an HTTP process failed")
            value = EngineDeadError("The server failed to answer.")
        if not sends_none and value is None:
            return
        self.show()
        send_reply(self._wire.send, number, value)

    def _forward(self, reader: ForwardingReader, event: Event) -> None:
        if not self._events:
            # All events of a step go out together.
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)
        if reader.is_complete:
            self._open.pop(reader.request_id, None)

    def _flush(self) -> None:
        events, self._events = self._events, []
        self.show()
        self._wire.send(Events(events))


def _acknowledge(known: asyncio.Future[None]) -> None:
    # A caller that waited too long has cancelled it.
    if not known.done():
        known.set_result(None)


class ForwardingReader:
    """Sends the events of one request on. Implements ``EventReader``.

    Attributes:
        request_id: the request.
        num_samples: see ``EventReader``.
        is_complete: likewise.
        has_one_event: likewise.
        is_overfull: False, since the reader of another process says when a client does not read.
    """

    is_overfull = False

    def __init__(self, message: Open, send: Callable[[ForwardingReader, Event], None]) -> None:
        self.request_id = message.request.request_id
        self.num_samples = message.num_samples
        self.has_one_event = message.has_one_event
        self.is_complete = False
        self._num_open = message.num_samples
        self._send = send

    def put(self, event: Event) -> None:
        """See ``EventReader``."""
        if self.is_complete:
            return
        self._num_open -= event.ends is Ends.SAMPLE
        self.is_complete = event.ends is Ends.REQUEST or (
            event.ends is Ends.SAMPLE and self._num_open == 0
        )
        self._send(self, event)

    def fail(self, error: ParallmError) -> None:
        """See ``EventReader``."""
        self.put(ErrorEvent(request_id=self.request_id, error=error))
