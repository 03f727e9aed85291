"""``EncoderClient`` on the event loop's side: the encoders, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.adapter_names import AdapterNames, NamedAdapter
from mlx_parallm.engine.commands import Abort, Command, Encode, EngineHost
from mlx_parallm.engine.encoder_interface import (
    EncoderLoad,
    EncoderModel,
    EncoderStatus,
    LoadedEncoder,
)
from mlx_parallm.engine.encoders.adapted_model import adapted_model
from mlx_parallm.engine.encoders.loader import ThreadLoader
from mlx_parallm.engine.encoders.residency import EncoderEntry, EncoderResidency
from mlx_parallm.engine.encoders.sources import MAX_NAME, MODEL, ModelSources
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.types.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    ModelLoadingError,
    ModelNotFoundError,
    ParallmError,
)
from mlx_parallm.types.pooling import EncodeRequest, EncodeResults, Task

logger = logging.getLogger(__name__)


class EngineThread(Protocol):
    """What this needs of the engine whose thread runs the encoders."""

    @property
    def config(self) -> EngineConfig:
        """The settings it was built from."""
        ...

    @property
    def control(self) -> AdapterNames:
        """What knows of adapters."""
        ...

    def check_open(self) -> None:
        """Raise ShuttingDownError or EngineDeadError if nothing is admitted any more."""
        ...

    def get_model(self, name: str) -> ServedModel:
        """The model that generates of this name; raise ModelNotFoundError."""
        ...

    async def ask(self, command: Callable[[Callable[[Any], None]], Command]) -> Any:
        """What the thread replies to a command; raise EngineDeadError if it dies before that."""
        ...

    async def call(self, action: Callable[[EngineHost], Any]) -> Any:
        """What an action between two steps gives; raise its error."""
        ...

    def tell(self, command: Command) -> None:
        """Send a command that nobody waits for."""
        ...

    def note_open(self) -> None:
        """Something has been opened or closed: find out whether the engine is idle."""
        ...


@dataclass(frozen=True, slots=True)
class _Addressed:
    """An encoder that a request names, and the adapter of it, if it names one."""

    entry: EncoderEntry
    adapter: NamedAdapter | None = None


class AsyncEncoders:
    """Implements ``EncoderClient``."""

    def __init__(self, thread: EngineThread, config: EngineConfig) -> None:
        self._thread = thread
        self._defaults = config.models[0] if config.models else ModelConfig()
        given = [one.path for one in config.models if one.path is not None]
        self._sources = ModelSources(config.loading, given)
        self._residency = EncoderResidency(
            ThreadLoader(thread, config), config.loading.max_encoder_bytes
        )
        self._num_open = 0
        self._numbers = count()

    @property
    def num_open(self) -> int:
        """Requests that are not answered."""
        return self._num_open

    def replace(self, encoders: Sequence[LoadedEncoder]) -> None:
        """The engine thread has loaded these, and nothing else."""
        entries = [
            EncoderEntry(one.config, one.model.names, one.model, is_loaded=one.is_loaded)
            for one in encoders
        ]
        loaded = {name: one for one in entries for name in one.names}
        others = [one for one in self._residency.entries() if one.names[0] not in loaded]
        for one in others:
            # Loaded at run time, before the thread was started anew: they come when asked for.
            one.is_loaded = False
        self._residency.by_name = loaded | {name: one for one in others for name in one.names}

    def models(self) -> Sequence[EncoderModel]:
        """See ``EncoderClient.models``."""
        return [one.model for one in self._residency.entries() if one.model is not None]

    def statuses(self) -> Sequence[EncoderStatus]:
        """See ``EncoderClient.statuses``."""
        return [one.status() for one in self._residency.entries()]

    def find(self, name: str) -> EncoderStatus | None:
        """See ``EncoderClient.find``."""
        found = self._address(name)
        if found is None:
            return None
        status, adapter = found.entry.status(), found.adapter
        if adapter is None:
            return status
        model = None if status.model is None else adapted_model(status.model, adapter)
        root = adapter.source or adapter.name
        return replace(status, names=(adapter.name,), root=root, model=model, parent=adapter.base)

    @contextlib.asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Have an encoder in memory while the block runs.

        Raises:
            ModelNotFoundError: none has the name.
            ModelLoadError: it cannot be loaded.
        """
        entry = self._residency.by_name.get(name)
        if entry is None:
            raise ModelNotFoundError(name)
        await self._residency.begin(entry)
        try:
            yield
        finally:
            self._residency.end(entry)

    def get(self, name: str | None, *tasks: Task) -> EncoderModel:
        """See ``EncoderClient.get``."""
        wanted = set(tasks)
        if name is None:
            able = [one for one in self.models() if wanted.intersection(one.info.tasks)]
            if not able:
                raise InvalidRequestError(
                    f"No model that can {' or '.join(tasks)} is served here.", param="model"
                )
            return able[0]
        status = self.find(name)
        if status is None:
            self._thread.get_model(name)
            raise InvalidRequestError(f"{name} generates; it is no encoder.", param="model")
        found = status.model
        if found is None:
            raise ModelLoadingError(name)
        if not wanted.intersection(found.info.tasks):
            raise InvalidRequestError(
                f"{name} cannot {' or '.join(tasks)}; it can {', '.join(found.info.tasks)}.",
                param="model",
            )
        return found

    async def encode(self, request: EncodeRequest) -> EncodeResults:
        """See ``EncoderClient.encode``."""
        self._thread.check_open()
        self._num_open += 1
        self._thread.note_open()
        try:
            result = await self._encode(request)
        finally:
            self._num_open -= 1
            self._thread.note_open()
        if isinstance(result, ParallmError):
            raise result
        return result

    async def _encode(self, request: EncodeRequest) -> Any:
        found = self._address(request.model)
        if found is None:
            raise ModelNotFoundError(request.model)
        adapter = found.adapter
        own = replace(
            request,
            model=found.entry.names[0],
            adapter=None if adapter is None else adapter.name,
            # Clients may give one id to several requests.
            request_id=f"{request.request_id}-{next(self._numbers)}",
        )
        async with self.hold(own.model):
            result = await self._ask(own)
        if isinstance(result, ModelNotFoundError) and adapter is not None and adapter.source:
            # It had to make way for others since it was loaded.
            await self._thread.control.refresh()
            await self._thread.control.ensure_loaded(adapter.name, adapter.base)
            async with self.hold(own.model):
                result = await self._ask(own)
        if isinstance(result, ModelLoadingError):
            # Whoever tries anew is to find what is there now.
            await self._thread.control.refresh()
            return ModelLoadingError(request.model)
        return result

    async def _ask(self, request: EncodeRequest) -> Any:
        try:
            return await self._thread.ask(lambda reply: Encode(request=request, reply=reply))
        except asyncio.CancelledError:
            self._thread.tell(Abort(request_id=request.request_id))
            raise

    async def wait(self, name: str) -> None:
        """See ``EncoderClient.wait``."""
        found = self._address(name)
        if found is None:
            raise ModelNotFoundError(name)
        async with self.hold(found.entry.names[0]):
            pass
        if found.adapter is not None:
            # Not while it is held: this holds it too, and who evicts it meanwhile lets in nobody
            # before the first one has gone.
            await self._thread.control.ensure_loaded(found.adapter.name, found.adapter.base)

    async def load(self, asked: EncoderLoad) -> EncoderStatus:
        """See ``EncoderClient.load``."""
        self._thread.check_open()
        entry = self._residency.by_name.get(asked.model)
        is_new = entry is None
        if entry is None:
            entry = self._new_entry(asked)
            self._residency.add(entry)
        elif set(asked.names) - set(entry.names):
            raise InvalidRequestError(f"{asked.model} has other names already.", param="name")
        entry.is_pinned = entry.is_pinned or asked.is_pinned
        try:
            await self._residency.begin(entry)
            self._residency.end(entry)
        except (ModelLoadError, ConfigError) as problem:
            raise InvalidRequestError(str(problem), param=MODEL) from problem
        finally:
            if is_new and entry.loading is None and not entry.is_loaded:
                await self._residency.unload(entry)
        logger.info("loaded %s", entry.names[0])
        return entry.status()

    async def unload(self, name: str) -> EncoderStatus:
        """See ``EncoderClient.unload``."""
        entry = self._residency.by_name.get(name)
        if entry is None:
            if self.find(name) is not None:
                raise InvalidRequestError(
                    f"{name} is an adapter: DELETE /v1/adapters/{name} unloads it.", param=MODEL
                )
            self._thread.get_model(name)
            raise InvalidRequestError(
                f"{name} generates; such models are not unloaded.", param=MODEL
            )
        # Who asked for it may go away: what was begun is ended.
        await asyncio.shield(asyncio.ensure_future(self._residency.unload(entry)))
        await self._thread.control.refresh()
        logger.info("unloaded %s", entry.names[0])
        return entry.status()

    def _address(self, name: str) -> _Addressed | None:
        """What requests call so."""
        entry = self._residency.by_name.get(name)
        if entry is not None:
            return _Addressed(entry)
        adapter = self._thread.control.named(name)
        entry = None if adapter is None else self._residency.by_name.get(adapter.base)
        return None if entry is None else _Addressed(entry, adapter)

    def _new_entry(self, asked: EncoderLoad) -> EncoderEntry:
        source = self._sources.resolve(asked.model)
        names = asked.names or (asked.model,)
        for name in names:
            self._check_name(name)
        config = replace(
            self._defaults,
            path=source,
            served_names=names,
            task=asked.task,
            revision=asked.revision,
            dtype=asked.dtype or self._defaults.dtype,
            max_model_len=asked.max_model_len,
            max_model_len_is_own=asked.max_model_len is not None,
        )
        return EncoderEntry(config, names, is_pinned=asked.is_pinned)

    def _check_name(self, name: str) -> None:
        if not name or len(name) > MAX_NAME:
            raise InvalidRequestError(f"A name has 1 to {MAX_NAME} characters.", param="name")
        try:
            self._thread.get_model(name)
        except ModelNotFoundError:
            return
        except InvalidRequestError:
            # An encoder has it.
            pass
        raise InvalidRequestError(f"A model or adapter is named {name!r} already.", param="name")
