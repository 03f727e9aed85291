"""Admits requests to the engines: finds their model, loads what they need, and sends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_parallm.engine.commands import Abort, Submit
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.directory import ModelDirectory
from mlx_parallm.engine.mailbox import Mailbox, OpenStreams
from mlx_parallm.engine.policies import AdapterUpload, NamedAdapter
from mlx_parallm.types.errors import ModelNotFoundError, ParallmError
from mlx_parallm.types.work import EventReader, Request


class Admission:
    """Opens the streams of requests on the event loop."""

    def __init__(
        self,
        mailbox: Mailbox,
        streams: OpenStreams,
        directory: ModelDirectory,
        control: EngineControl,
        check_open: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            mailbox: takes requests to the engines.
            streams: the requests that are open.
            directory: the models that they may name.
            control: loads adapters that they name, and pauses.
            check_open: raises if nothing is admitted any more.
        """
        self._mailbox = mailbox
        self._streams = streams
        self._directory = directory
        self._control = control
        self._check_open = check_open

    async def open(
        self, request: Any, reader: EventReader | None = None, *, is_beside: bool = False
    ) -> Any:
        """Admit a request of any kind of model; return the reader of its events.

        A reader of one event may get a refusal of the engine instead, so that the event loop is
        woken once for the request and not for its admission.

        Args:
            request: names a model or an adapter.
            reader: reads the events; a new one of the model if it is not given.
            is_beside: True for a request of work beside the model, which is not of the model's kind
                and so is not checked by it.

        Raises:
            ModelNotFoundError: nothing has the name that it gives.
            InvalidRequestError, ContextLengthError: it can never be served.
            OverloadedError: the queue is full.
            PausedError, ShuttingDownError, EngineDeadError: nothing is admitted.
        """
        self._check_open()
        self._control.check_open()
        entry, adapter = self._directory.address(request.model)
        if entry is None:
            raise self._control.names.not_found(request.model)
        if entry.model is not None and not is_beside:
            entry.model.check(request)
        base = entry.names[0]
        self._streams.enter()
        try:
            if adapter is not None:
                await self._control.ensure_loaded(adapter.name, base)
                self._control.check_open()
            await self._directory.begin(entry, request)
            assert entry.model is not None, "it is loaded"
            try:
                # Engines are known by their model's first name only.
                name = request.adapter if adapter is None else adapter.name
                if (request.model, request.adapter) != (base, name):
                    request = replace(request, model=base, adapter=name)
                reader = reader or entry.model.reader(request)
                self._streams.open(request, reader, partial(self._directory.end, entry))
            except BaseException:
                self._directory.end(entry)
                raise
        finally:
            self._streams.leave()
        if reader.has_one_event and adapter is None:
            await self._submit(request, reader)
        else:
            await self._admit(request, adapter)
        return reader

    async def _submit(self, request: Request, reader: EventReader) -> None:
        """Send an open request of one event, which is the refusal if it is refused."""
        refuse = partial(self._streams.fail, request.request_id, reader)
        arrival_s = time.monotonic()
        try:
            self._mailbox.submit(
                lambda reply: Submit(request=request, arrival_s=arrival_s, reply=reply), refuse
            )
        except OSError:
            self.abort(request.request_id)
            raise

    async def _admit(self, request: Request, adapter: NamedAdapter | None) -> None:
        """Ask the thread to admit an open request; close the request if it is refused."""
        request_id = request.request_id
        try:
            refusal = await self._send(request)
            if isinstance(refusal, ModelNotFoundError) and adapter is not None:
                refusal = await self._send_with_adapter(request, adapter.name)
        except (asyncio.CancelledError, OSError):
            self.abort(request_id)
            raise
        if refusal is not None:
            self._streams.close(request_id)
            raise refusal

    def abort(self, request_id: str) -> None:
        """End a request between two steps and free its blocks; unknown ids are ignored."""
        if self._streams.close(request_id):
            self._mailbox.send(Abort(request_id=request_id))

    async def _send(self, request: Any, upload: AdapterUpload | None = None) -> ParallmError | None:
        """Hand a request to the thread; return its refusal, or None once it is admitted."""
        arrival_s = time.monotonic()
        return await self._mailbox.ask(
            lambda reply: Submit(request=request, arrival_s=arrival_s, upload=upload, reply=reply)
        )

    async def _send_with_adapter(self, request: Any, name: str) -> ParallmError | None:
        """``_send`` a request with its adapter, which was evicted for another one meanwhile."""
        try:
            upload = await self._control.read_named(name)
        except ParallmError as refusal:
            return refusal
        refusal = await self._send(request, upload)
        if refusal is None:
            await self._control.refresh()
        return refusal
