"""``RequestClient`` in an HTTP process: what it serves, and its requests to the engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_parallm.config import EngineConfig
from mlx_parallm.conversations.records import StoredChat
from mlx_parallm.engine.adapter_control import AdapterNames, with_adapter
from mlx_parallm.engine.adapter_folders import AdapterFolders
from mlx_parallm.engine.commands import Abort
from mlx_parallm.engine.mailbox import OpenStreams
from mlx_parallm.engine.models import EngineState, ServedModel
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.engine.sources import default_for
from mlx_parallm.engine.status import CheckRoom, ModelStatus
from mlx_parallm.peers.channel import UnreadableError, pack
from mlx_parallm.peers.messages import (
    Catalog,
    Events,
    KeepChat,
    Known,
    KnownModel,
    Open,
    Query,
    Reply,
    SetTtl,
    StartHttp,
    Wait,
)
from mlx_parallm.peers.replies import Recipient, Replies
from mlx_parallm.peers.wire import Wire
from mlx_parallm.types.errors import ModelNotFoundError, ParallmError
from mlx_parallm.types.request import WeightsVersion
from mlx_parallm.types.work import EventReader

logger = logging.getLogger(__name__)


class KnownVersions:
    """The adapters and versions of the latest catalog. Implements ``Versions``."""

    def __init__(self, names: AdapterNames, first: Callable[[], str]) -> None:
        self._names = names
        self._first = first
        self.known: Mapping[str, WeightsVersion] = {}

    def adapters(self) -> Sequence[AdapterInfo]:
        """See ``Versions``."""
        return self._names.listed()

    def version(self, model: str | None = None) -> WeightsVersion:
        """See ``Versions``."""
        return self.known.get(model or self._first(), WeightsVersion())


class RemoteClient:
    """Implements ``RequestClient`` by messages to the process that chooses among the engines."""

    def __init__(
        self, start: StartHttp, wire: Wire, on_shared: Callable[[Any], None] = lambda shared: None
    ) -> None:
        """Prepare; the first catalog is to be taken before any request.

        Args:
            start: how it is set up.
            wire: to the other process.
            on_shared: is called with what applications share.
        """
        self.config: EngineConfig = start.engine_config
        self._start = start
        self._wire = wire
        self._on_shared = on_shared
        self._streams = OpenStreams()
        self._replies = Replies()
        self._models: dict[int, ServedModel] = {}
        self._statuses: list[ModelStatus] = []
        self._by_name: dict[str, ModelStatus] = {}
        self._names = AdapterNames(self, AdapterFolders(start.engine_config.adapters))
        self.control = KnownVersions(self._names, self._names.first_base)

    def take(self, message: Any, number: int) -> bool:
        """Take a message of the other process; False if it is not about requests."""
        match message:
            case Events():
                for request_id in self._streams.dispatch(message.events):
                    self._wire.send(Abort(request_id=request_id))
            case Reply(value):
                self._replies.settle(number, value)
            case UnreadableError() if number:
                logger.error("a reply cannot be read", exc_info=message)
                self._replies.settle(number, message)
            case KnownModel():
                self._loop = asyncio.get_running_loop()
                self._models[message.number] = message.model.unpack(self._ask_engine)
            case Catalog():
                self._note(message)
            case Known():
                self._wire.send(Known(), number)
            case _:
                return False
        return True

    def statuses(self) -> Sequence[ModelStatus]:
        """See ``RequestClient``."""
        return self._statuses

    def status_of(self, name: str) -> ModelStatus | None:
        """See ``ServedModels``."""
        return self._by_name.get(name)

    def model_names(self) -> Collection[str]:
        """See ``ServedModels``."""
        return self._by_name.keys()

    def find(self, name: str) -> ModelStatus | None:
        """See ``RequestClient``."""
        status = self._by_name.get(name)
        adapter = self._names.named(name) if status is None else None
        if adapter is None:
            alias = default_for(name, self.config.loading) if status is None else None
            return status if alias is None else self._by_name.get(alias)
        base = self._by_name.get(adapter.base)
        return None if base is None else with_adapter(base, adapter)

    def not_found(self, name: str) -> ModelNotFoundError:
        """See ``RequestClient``."""
        return self._names.not_found(name)

    async def check_queue(self, model: str, client: str, n: int) -> None:
        """See ``RequestDoor``."""
        limit = self.config.scheduler.max_waiting
        # The other HTTP processes have about as many samples open as this one.
        if limit and self._streams.num_samples * self._start.num_processes + n > limit:
            await self._ask(CheckRoom(model, client, n))

    async def wait(self, name: str, client: str = "") -> None:
        """See ``RequestDoor``."""
        await self._ask(Wait(name, client))

    def set_ttl(self, name: str, ttl_s: float | None) -> None:
        """See ``RequestDoor``."""
        self._wire.send(SetTtl(name, ttl_s))

    async def keep_chat(self, chat: StoredChat) -> None:
        """Store a chat; see ``ChatStore.keep``."""
        await self._ask(KeepChat(chat))

    async def refresh(self) -> None:
        """Know the adapters as they are now: every answer comes after the latest catalog."""

    async def open_reader(self, request: Any) -> Any:
        """See ``EngineCore.open_reader``."""
        status = self.find(request.model)
        if status is None:
            raise self.not_found(request.model)
        model: ServedModel = status.model
        reader = model.reader(request)
        if reader.has_one_event:
            self._submit(request, reader)
            return reader
        self._streams.open(request, reader)
        try:
            await self._ask(Open(request, reader.num_samples))
        except ParallmError:
            self._streams.close(request.request_id)
            raise
        except asyncio.CancelledError:
            await self.abort(request.request_id)
            raise
        return reader

    def _submit(self, request: Any, reader: EventReader) -> None:
        """Send a request of one event, which is the refusal if it is refused."""
        number = 0
        self._streams.open(request, reader, lambda: self._replies.forget(number))
        refuse = partial(self._streams.fail, request.request_id, reader)
        number = self._send(Open(request, reader.num_samples, has_one_event=True), refuse)

    async def abort(self, request_id: str) -> None:
        """See ``RequestClient``."""
        if self._streams.close(request_id):
            self._wire.send(Abort(request_id=request_id))

    async def cancel(self, request_id: str) -> None:
        """See ``RequestClient``."""
        if request_id in self._streams:
            self._wire.send(Abort(request_id=request_id, is_notified=True))

    async def _ask(self, question: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = self._send(question, answer)
        try:
            return await answer
        finally:
            self._replies.forget(number)

    def _ask_engine(
        self, question: Callable[[EngineState], Any], key: Hashable = None
    ) -> Future[Any]:
        """See ``Ask``; called on any thread, like the one that compiles grammars."""
        answer: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._send, Query(question, key), answer)
        return answer

    def _send(self, question: Any, recipient: Recipient) -> int:
        return self._replies.ask(recipient, partial(pack, question), self._wire.send_packed)

    def _note(self, catalog: Catalog) -> None:
        self._statuses = [
            status if number is None else replace(status, model=self._models[number])
            for status, number in catalog.statuses
        ]
        kept = {number for _, number in catalog.statuses}
        self._models = {key: model for key, model in self._models.items() if key in kept}
        self._by_name = {name: status for status in self._statuses for name in status.names}
        self._names.known, self._names.kept = catalog.adapters, catalog.kept
        self.control.known = catalog.versions
        self._on_shared(catalog.shared)
