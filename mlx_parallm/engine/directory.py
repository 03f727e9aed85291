"""The models that requests may name: found, held in memory, loaded and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.confinement import check_name
from mlx_parallm.demo_models.folders import DEMO_NAME, demo_folder
from mlx_parallm.engine.adapter_control import with_adapter
from mlx_parallm.engine.catalogue import Catalogue, FoundModel
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.ledger import Claim
from mlx_parallm.engine.model_entry import ModelEntry
from mlx_parallm.engine.models import ModelMemory
from mlx_parallm.engine.policies import NamedAdapter
from mlx_parallm.engine.residency import Residency
from mlx_parallm.engine.sources import MODEL, ModelSources, default_for
from mlx_parallm.engine.status import ModelState, ModelStatus
from mlx_parallm.types.errors import (
    ConfigError,
    ConflictError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    PausedError,
    PermissionDeniedError,
)
from mlx_parallm.types.work import Request

logger = logging.getLogger(__name__)

# SCAN_S: seconds between two looks at the folders of models.
SCAN_S = 10.0


class ModelDirectory:
    """The models of a server, and their adapters, by name. It belongs to the event loop."""

    def __init__(self, config: EngineConfig, residency: Residency, control: EngineControl) -> None:
        """Prepare; ``residency`` has the models, ``control`` the names of adapters."""
        self._residency = residency
        self._control = control
        self._defaults = config.loading.model
        paths = [model.path for model in config.models if model.path is not None]
        self._sources = ModelSources(config.loading, paths)
        self._loading = config.loading
        self._catalogue = Catalogue(config.loading)

    @property
    def number(self) -> int:
        """Another number after each change that ``statuses`` show."""
        return self._residency.number

    def on_moved(self, note: Callable[[], None]) -> None:
        """Have ``note`` called after each such change, on any thread."""
        self._residency.on_moved = note

    def statuses(self) -> Sequence[ModelStatus]:
        """Return all models that requests may name, and those that are being loaded.

        Models that may be meant where no model is named come first.
        """
        statuses = (entry.status() for entry in self._residency.entries())
        return sorted(statuses, key=lambda status: not status.is_default)

    def memory(self, cache_bytes: Mapping[str, int], num_engines: int) -> dict[str, ModelMemory]:
        """Return the memory of each model at all engines, by its first name.

        All engines have the same models and adapters; ``cache_bytes`` are those of their caches
        together, by model.
        """
        adapter_bytes: Counter[str] = Counter()
        for info in self._control.adapters():
            adapter_bytes[info.model] += info.num_bytes
        memory: dict[str, ModelMemory] = {}
        for status in self.statuses():
            name, is_loaded = status.names[0], status.state is ModelState.LOADED
            own: ModelMemory = status.model.memory if is_loaded else ModelMemory()
            memory[name] = ModelMemory(
                weights=own.weights * num_engines,
                kv=own.kv * num_engines,
                cache=cache_bytes.get(name, 0),
                adapters=adapter_bytes[name] * num_engines,
            )
        return memory

    def status_of(self, name: str) -> ModelStatus | None:
        """See ``ServedModels``."""
        entry = self._residency.by_name.get(name)
        return None if entry is None else entry.status()

    def model_names(self) -> Collection[str]:
        """See ``ServedModels``."""
        return self._residency.by_name.keys()

    def is_taken(self, name: str) -> bool:
        """True if a model or an adapter has this name itself, not one that stands for it."""
        return name in self._residency.by_name or self._control.names.named(name) is not None

    def find(self, name: str) -> ModelStatus | None:
        """Return the model or adapter of this name; None if there is none."""
        entry, adapter = self.address(name)
        if entry is None:
            return None
        status = entry.status()
        return status if adapter is None else with_adapter(status, adapter)

    def address(self, name: str) -> tuple[ModelEntry | None, NamedAdapter | None]:
        """Return the model that a name stands for, if there is one, and the adapter of it."""
        entry = self._residency.by_name.get(name)
        adapter = self._control.names.named(name) if entry is None else None
        if adapter is not None:
            entry = self._residency.by_name.get(adapter.base)
        elif entry is None and (alias := default_for(name, self._loading)) is not None:
            entry = self._residency.by_name.get(alias)
        return entry, adapter

    def set_ttl(self, name: str, ttl_s: float | None) -> None:
        """See ``RequestDoor``."""
        entry, _ = self.address(name)
        if entry is not None:
            self._residency.set_ttl(entry, ttl_s)

    def expires_in_s(self, name: str) -> float | None:
        """Return in how many seconds a model is evicted unless a request comes; None: never."""
        entry, _ = self.address(name)
        if entry is None or math.isinf(entry.expires_s):
            return None
        return max(0.0, entry.expires_s - asyncio.get_running_loop().time())

    def claims(self) -> tuple[Sequence[Claim], int | None]:
        """Return the memory that is promised to models, and its limit; None if it is not known."""
        return self._residency.ledger.claims(), self._residency.ledger.limit

    async def watch(self) -> None:
        """List the models that lie in folders, and count the idle time of loaded ones, for ever."""
        await self._residency.start()
        while self._catalogue:
            try:
                await self._look()
            except Exception:
                logger.exception("the folders of models cannot be looked at; trying again")
            await asyncio.sleep(SCAN_S)

    async def _look(self) -> None:
        """List the models that lie in folders, and let other processes know of a change."""
        before = set(self._residency.by_name)
        self.list_found(await asyncio.to_thread(self._catalogue.scan))
        if set(self._residency.by_name) != before:
            await self._control.announce()

    def scan(self) -> None:
        """List the models that lie in folders."""
        self.list_found(self._catalogue.scan())

    def list_found(self, models: Mapping[str, FoundModel]) -> None:
        """Let requests name the models that lie in folders, and not those that lie there no more.

        What is or was loaded stays as it is.
        """
        for entry in self._residency.entries():
            if entry.is_listed and entry.is_untouched and entry.name not in models:
                self._residency.remove(entry)
        for model in models.values():
            if not self.is_taken(model.name):
                config = replace(self._defaults, path=str(model.path), served_names=(model.name,))
                entry = ModelEntry(config, (model.name,), is_listed=True)
                entry.size_bytes = model.size_bytes
                self._residency.add(entry)

    @contextlib.asynccontextmanager
    async def hold(self, model: str) -> AsyncGenerator[None]:
        """Have a model in memory while the block runs.

        Raises:
            ModelNotFoundError: none has the name.
            InvalidRequestError, NoRoomError: it cannot be loaded.
            PausedError: it is not in memory, and the server is asleep.
        """
        entry = self._residency.by_name.get(model)
        if entry is None:
            raise ModelNotFoundError(model)
        async with self.held(entry):
            yield

    async def wait(self, name: str, client: str) -> None:
        """Return once a model or adapter is loaded, for a client; raise as ``hold`` does."""
        entry, adapter = self.address(name)
        if entry is None:
            raise ModelNotFoundError(name)
        async with self.held(entry, client):
            pass
        if adapter is not None:
            # The model is not held meanwhile, because an eviction would wait for this load, and
            # this load for the one after the eviction.
            await self._control.ensure_loaded(adapter.name, adapter.base)

    @contextlib.asynccontextmanager
    async def held(self, entry: ModelEntry, client: str = "") -> AsyncGenerator[None]:
        """Have a model in memory for a client while the block runs; raise as ``hold`` does."""
        await self._begin(entry, client)
        try:
            yield
        finally:
            self._residency.end(entry)

    async def begin(self, entry: ModelEntry, request: Request) -> None:
        """Have a model in memory for a request, until ``end``; raise as ``hold`` does."""
        if entry.is_loaded:
            await self._residency.begin(entry)
            return
        await self._begin(entry, request.work().client)

    def end(self, entry: ModelEntry) -> None:
        """Note that a request that ``begin`` let in is answered."""
        self._residency.end(entry)

    async def _begin(self, entry: ModelEntry, client: str) -> None:
        if self._control.sleep_level and not entry.is_loaded:
            # A load would take the memory that the sleep has freed.
            raise PausedError
        try:
            await self._residency.begin(entry, client)
        except (ModelLoadError, ConfigError) as problem:
            raise InvalidRequestError(str(problem), param=MODEL) from problem

    def note_changed(self, name: str, folder: Path | None) -> None:
        """Note new weights of a model: all from a folder, or some of them.

        If they are not those that it would be loaded with again, it stays in memory.
        """
        entry = self._residency.by_name.get(name)
        if entry is not None:
            own = _folder_of(entry)
            entry.is_changed = folder is None or folder.resolve() != own.resolve()

    def own_folder(self, name: str) -> Path | None:
        """Return the folder that a model is loaded from; None if it has none on this disk."""
        entry = self._residency.by_name.get(name)
        folder = None if entry is None else _folder_of(entry)
        return folder if folder is not None and folder.is_dir() else None

    def source_of(self, load: ModelLoad) -> ModelConfig:
        """Return where a load reads its model from; raise as ``load`` does if it may not."""
        entry = self._residency.by_name.get(load.model)
        path = self._sources.resolve(load.model) if entry is None else entry.config.path
        return replace(self._defaults, path=path, revision=load.revision)

    async def load(self, load: ModelLoad) -> ModelStatus:
        """Serve one more model; return once it is loaded.

        Raises:
            InvalidRequestError: it may not be loaded, cannot be, or its name is taken.
            NotFoundError: there is no such folder.
        """
        entry = self._residency.by_name.get(load.model)
        is_new = entry is None
        if entry is None:
            entry = self._new_entry(load)
            self._residency.add(entry)
        else:
            self._check_known(entry, load)
        try:
            async with self.held(entry):
                entry.is_pinned = entry.is_pinned or load.is_pinned
                if load.ttl_s is not None:
                    entry.ttl_s = None if math.isinf(load.ttl_s) else load.ttl_s
        finally:
            if is_new and entry.loading is None and not entry.is_loaded:
                await self._residency.unload(entry)
        logger.info("loaded %s", entry.names[0])
        return entry.status()

    def is_listed(self, name: str) -> bool:
        """True if a model has this name, loaded or not."""
        return name in self._residency.by_name

    def check_unload(self, name: str) -> None:
        """Raise what ``unload`` would."""
        self._unloadable(name)

    def check_delete(self, name: str) -> None:
        """Check that a model or adapter was loaded at run time, and that nothing loads it again.

        Raises:
            ModelNotFoundError: nothing has this name of its own.
            PermissionDeniedError: the server was started with it.
            ConflictError: it lies in a folder of the server's own.
        """
        entry, adapter = self.address(name)
        if entry is None or (adapter is None and name not in entry.names):
            raise self._control.names.not_found(name)
        if adapter is None and not entry.is_added and not entry.is_listed:
            raise PermissionDeniedError(
                f"The server was started with {name}; /v1/models/unload frees its memory.",
                param=MODEL,
            )
        if entry.is_listed if adapter is None else self._control.names.may_return(adapter.name):
            route = "/v1/models/unload" if adapter is None else f"DELETE /v1/adapters/{name}"
            raise ConflictError(
                f"{name} lies in a folder of the server; {route} frees its memory.", param=MODEL
            )

    async def unload(self, name: str) -> ModelStatus:
        """Admit no more requests of a model, and free its memory once those have ended.

        Its adapters go with it.

        Raises:
            ModelNotFoundError: none has the name.
            InvalidRequestError: it is an adapter, or cannot be unloaded.
        """
        entry = self._unloadable(name)
        # The model is unloaded even if the caller is cancelled.
        await asyncio.shield(asyncio.ensure_future(self._unload(entry)))
        logger.info("unloaded %s", entry.names[0])
        return entry.status()

    def _unloadable(self, name: str) -> ModelEntry:
        entry = self._residency.by_name.get(name)
        if entry is None:
            if not self.is_taken(name):
                raise self._control.names.not_found(name)
            raise InvalidRequestError(
                f"{name} is an adapter: DELETE /v1/adapters/{name} unloads it.", param=MODEL
            )
        if entry.refuses_unload is not None:
            raise InvalidRequestError(f"{name} {entry.refuses_unload}", param=MODEL)
        return entry

    async def _unload(self, entry: ModelEntry) -> None:
        await self._residency.unload(entry)
        if entry.is_listed and self._residency.by_name.keys().isdisjoint(entry.names):
            # It lies in its folder still, where a request finds it again.
            self._residency.add(
                ModelEntry(entry.config, entry.names, is_listed=True, size_bytes=entry.size_bytes)
            )
        await self._control.refresh()
        self._control.note_unloaded(entry.names[0])

    def _check_known(self, entry: ModelEntry, load: ModelLoad) -> None:
        """Give a model that was never loaded the settings of a load.

        Raises:
            InvalidRequestError: it has other names; or it was loaded, with other settings.
        """
        if set(load.names) - set(entry.names):
            raise InvalidRequestError(
                f"{load.model} is known under other names already.", param="name"
            )
        config = self._with_settings(entry.config, load)
        if entry.is_untouched:
            entry.config = config
        elif config != entry.config and load != _plain(load):
            raise InvalidRequestError(
                f"{load.model} was loaded with other settings; unload it first.", param=MODEL
            )

    def _with_settings(self, config: ModelConfig, load: ModelLoad) -> ModelConfig:
        return replace(
            config,
            task=load.task,
            revision=load.revision,
            dtype=load.dtype or self._defaults.dtype,
            max_model_len=load.max_model_len,
            max_model_len_is_own=load.max_model_len is not None,
        )

    def _new_entry(self, load: ModelLoad) -> ModelEntry:
        source = self._sources.resolve(load.model)
        names = load.names or (load.model,)
        for name in names:
            check_name(name)
            if self.is_taken(name):
                raise _name_is_taken(name)
        config = replace(self._defaults, path=source, served_names=names)
        return ModelEntry(self._with_settings(config, load), names, is_added=True)


def _folder_of(entry: ModelEntry) -> Path:
    source = entry.config.path or DEMO_NAME
    return demo_folder(source) or Path(source).expanduser()


def _plain(load: ModelLoad) -> ModelLoad:
    """Return a load without settings of the model."""
    return ModelLoad(model=load.model, names=load.names, is_pinned=load.is_pinned, ttl_s=load.ttl_s)


def _name_is_taken(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name!r} is the name of a model or adapter already.", param="name")
