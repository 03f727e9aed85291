"""The adapters of all models by their names, whatever their models do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol

from mlx_parallm.config import AdapterConfig
from mlx_parallm.confinement import MAX_NAME
from mlx_parallm.engine.adapter_commands import EnsureAdapter, ListVersions, LoadedVersions, taken
from mlx_parallm.engine.adapter_folders import AdapterFolders
from mlx_parallm.engine.changes import Changes, LoadAdapter, RemoveAdapter
from mlx_parallm.engine.commands import EngineDoor
from mlx_parallm.engine.control_metrics import ADAPTER, ControlMetrics
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload, NamedAdapter
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.types.errors import (
    MAX_LISTED_MODELS,
    InvalidRequestError,
    ModelNotFoundError,
    ParallmError,
)
from mlx_parallm.types.request import WeightsVersion

logger = logging.getLogger(__name__)


class ServedModels(Protocol):
    """Models that requests may name."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return all of them; those that may be meant where no model is named come first."""
        ...

    def status_of(self, name: str) -> ModelStatus | None:
        """Return the model that has this name itself, in constant time; None if there is none."""
        ...

    def model_names(self) -> Collection[str]:
        """Return all names of all models, in constant time."""
        ...


class AdapterNames:
    """The adapters of all models, by their names.

    Attributes:
        known: the loaded adapters by name, as of the latest change; it is replaced, not changed.
        kept: adapters in folders of the server's own, by name, as ``keep`` had them; it is
            replaced, too.
    """

    def __init__(self, models: ServedModels, folders: AdapterFolders) -> None:
        """Begin without adapters.

        Args:
            models: have the adapters.
            folders: has those that are loaded once a request names them.
        """
        self.known: Mapping[str, AdapterInfo] = {}
        self.kept: Mapping[str, NamedAdapter] = {}
        self._models = models
        self._folders = folders

    def listed(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters of all models that can be named."""
        # Adapters of a model that is being unloaded can no longer be named.
        return [info for info in self.known.values() if self.names_of(info.model)]

    def find(self, name: str) -> AdapterInfo | None:
        """Return the loaded adapter of this name, perhaps "model:name"; None if there is none."""
        if name in self.known:
            return self.known[name]
        # Names of models and of adapters may have colons, too.
        for end in _colons(name):
            info = self.known.get(name[end + 1 :])
            if info is not None and name[:end] in self.names_of(info.model):
                return info
        return None

    def named(self, name: str) -> NamedAdapter | None:
        """Return the adapter of this name, loaded or in the directory of adapters by name."""
        info = self.find(name)
        if info is not None:
            return NamedAdapter(info.name, info.model, info.source, info)
        if name in self.kept:
            own = self.kept[name]
            return own if self._models.status_of(own.base) is not None else None
        model, _, short = name.rpartition(":")
        base = self._models.status_of(model)
        source = self._folders.find(name if base is None else short)
        if source is None:
            return None
        if base is None:
            base, short = self._first_adapted(), name
        if base is None or not base.may_adapt:
            return None
        return NamedAdapter(short, base.names[0], str(source))

    def may_return(self, name: str) -> bool:
        """True if a request of an adapter loads it again once it was evicted."""
        return name in self.kept or self._folders.find(name) is not None

    def not_found(self, name: str) -> ModelNotFoundError:
        """Return the error for a name that nothing has; it lists what is served."""
        names = self._models.model_names()
        if len(names) > MAX_LISTED_MODELS:
            # Adapters would not be listed, but counted.
            return ModelNotFoundError(name, names)
        return ModelNotFoundError(name, [*names, *(info.name for info in self.listed())])

    def names_of(self, model: str) -> tuple[str, ...]:
        """Return all names of the model that has this name; empty if there is no such model."""
        status = self._models.status_of(model)
        return () if status is None else status.names

    def adapted(self, model: str | None) -> str:
        """Return the first name of the model whose adapters are meant; None means the first.

        Raises:
            ModelNotFoundError: there is no such model.
            InvalidRequestError: it takes no adapters, or none does.
        """
        status = self._first_adapted() if model is None else self._models.status_of(model)
        if model is not None and status is None:
            raise ModelNotFoundError(model)
        if status is None:
            raise InvalidRequestError("No model here takes adapters.", param="model")
        if not status.may_adapt:
            raise status.no_adapters(status.names[0])
        return status.names[0]

    def _first_adapted(self) -> ModelStatus | None:
        return next((each for each in self._models.statuses() if each.may_adapt), None)

    def first_base(self) -> str:
        """Return the name of the model that is meant where none is named."""
        statuses = self._models.statuses()
        if not statuses:
            raise InvalidRequestError("No model is served here.", param="model")
        return statuses[0].names[0]


def _colons(name: str) -> list[int]:
    """Return where a model's name may end and that of its adapter, which is short, follow."""
    first = max(0, len(name) - MAX_NAME - 1)
    return [place for place in range(first, len(name)) if name[place] == ":"]


def with_adapter(status: ModelStatus, adapter: NamedAdapter) -> ModelStatus:
    """Return the status of an adapter whose model has ``status``."""
    model = None if status.model is None else status.model.with_adapter(adapter)
    root = adapter.source or adapter.name
    return replace(status, names=(adapter.name,), root=root, model=model, parent=adapter.base)


async def _announce_nothing() -> None:
    """Return at once: no other process names adapters."""


class AdapterControl:
    """Loads and finds adapters. Lives on the event loop.

    Attributes:
        door: where commands enter.
        here: carries out changes at this server alone.
        changes: carries out an operator's changes, perhaps at further servers too.
        names: finds adapters by name, as the engine thread had them after the latest change.
        versions: of the models' weights, by first names.
        spared: returns adapters of a model that no other one evicts unless a change says so.
        sleep_level: of the latest ``sleep``; 0 while awake.
        announce: is awaited when adapters are kept or forgotten: other processes name them, too.
    """

    here: Changes
    changes: Changes

    def __init__(self, door: EngineDoor, config: AdapterConfig, metrics: ControlMetrics) -> None:
        self.door = door
        self._metrics = metrics
        self._folders = AdapterFolders(config)
        self.sleep_level = 0
        self.announce: Callable[[], Awaitable[None]] = _announce_nothing
        self.names = AdapterNames(door, self._folders)
        self.versions: Mapping[str, WeightsVersion] = {}
        self.spared: Callable[[str], frozenset[str]] = lambda _model: frozenset()
        # Loads of adapters that are found by name, so that many requests share one.
        self._loading: dict[tuple[str, str], asyncio.Future[AdapterInfo]] = {}
        self._numbers = count()

    def next_number(self) -> int:
        """Return a number for the commands of one load."""
        return next(self._numbers)

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters of all models, as of the latest change of one."""
        return self.names.listed()

    def unloaded(self) -> Sequence[str]:
        """Return the names of kept adapters that the next request of one loads; see ``keep``."""
        names = self.names
        return [name for name in names.kept if name not in names.known and names.named(name)]

    async def look(self) -> Sequence[AdapterInfo]:
        """Ask the engine thread first: slots and running counts change with every step."""
        await self.refresh()
        return self.adapters()

    async def refresh(self) -> None:
        """Ask the engine thread which adapters and versions it has."""
        self.note_loaded(await self.door.call(ListVersions()))

    def note_loaded(self, loaded: LoadedVersions) -> None:
        """Note which adapters and versions the engine thread has."""
        infos, self.versions = loaded
        self.names.known = {info.name: info for info in infos}

    async def ensure_loaded(self, name: str, base: str) -> None:
        """Load an adapter of a model that was found by its name, unless it is there.

        Raises:
            ModelNotFoundError: there is none.
            InvalidRequestError: it cannot be used.
        """
        known = self.names.known.get(name)
        if known is not None and known.model == base:
            return
        key = name, base
        if key not in self._loading:
            loading = asyncio.ensure_future(self._load_by_name(name, base))
            self._loading[key] = loading
            loading.add_done_callback(lambda done: self._end_loading(key, done))
        # A caller may be cancelled while others wait for the same load.
        await asyncio.shield(self._loading[key])

    async def keep(self, name: str, base: str, folder: Path, *, loads: bool = True) -> None:
        """Serve an adapter of a folder that the server has written, until ``forget_kept``.

        It may be unloaded while no request names it, and is loaded again by the next one. An
        adapter that was kept under this name before is replaced.

        Args:
            name: for requests.
            base: the first name of its model.
            folder: has the adapter.
            loads: False to load it once a request names it.
        """
        before = self.names.kept.get(name)
        self.names.kept = {**self.names.kept, name: NamedAdapter(name, base, str(folder))}
        try:
            if before is not None and before.source != str(folder) and name in self.names.known:
                await self.here.apply(RemoveAdapter(name))
            if loads:
                await self._load_kept(name, base)
        finally:
            await self.announce()

    async def _load_kept(self, name: str, base: str) -> None:
        """Load a kept adapter now, if there is room for it."""
        try:
            await self.ensure_loaded(name, base)
        except ParallmError as problem:
            logger.warning("%s is loaded once a request names it: %s", name, problem)

    async def forget_kept(self, name: str) -> None:
        """Serve a kept adapter no more; nothing happens if there is none."""
        if name not in self.names.kept:
            return
        kept = self.names.kept
        self.names.kept = {other: adapter for other, adapter in kept.items() if other != name}
        try:
            if name in self.names.known:
                await self.here.apply(RemoveAdapter(name))
        finally:
            await self.announce()

    async def read_named(self, name: str) -> AdapterUpload:
        """Return an adapter that requests may name before it is loaded.

        Raises:
            ModelNotFoundError: there is none.
        """
        own = self.names.kept.get(name)
        if own is not None and own.source is not None:
            weights = await self._folders.read_own(Path(own.source))
            return AdapterUpload(name=name, weights=weights, source=own.source)
        weights, source = await self._folders.read_named(name)
        return AdapterUpload(name=name, weights=weights, source=source)

    async def load_adapter(self, upload: AdapterUpload, *, model: str | None = None) -> AdapterInfo:
        """Serve an adapter of a model, by default of the first one that takes adapters.

        Raises:
            VersionMismatchError: another version is there than was expected.
            InvalidRequestError: it does not fit the model, its name is taken, or there is no room.
            OverloadedError: there will be room once requests have ended.
        """
        change = LoadAdapter(upload, self.names.adapted(model))
        # The load is completed even if its caller is cancelled.
        with self._metrics.timed(ADAPTER):
            return await asyncio.shield(asyncio.ensure_future(self.changes.apply(change)))

    async def load_adapter_folder(
        self,
        name: str,
        path: str,
        *,
        model: str | None = None,
        version: str | None = None,
        expected_version: str | None = None,
        replaces: bool = False,
        is_pinned: bool | None = None,
    ) -> AdapterInfo:
        """``load_adapter`` of what PEFT or mlx-lm wrote into a folder.

        ``path`` must be below a root that the configuration allows, or an id on the hub that it
        allows.
        """
        weights, source = await self._folders.read(path)
        upload = AdapterUpload(
            name=name,
            weights=weights,
            version=version,
            expected_version=expected_version,
            replaces=replaces,
            is_pinned=is_pinned,
            source=source,
        )
        return await self.load_adapter(upload, model=model)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Admit no more requests of an adapter; raise NotFoundError."""
        return await self.changes.apply(RemoveAdapter(name))

    async def _load_by_name(self, name: str, base: str) -> AdapterInfo:
        self.check_adapter_name(name, base)
        upload = await self.read_named(name)
        async with self.door.hold(base):
            info = await self.door.call(EnsureAdapter(upload, base, spared=self.spared(base)))
        await self.refresh()
        return info

    def _end_loading(self, key: tuple[str, str], done: asyncio.Future[AdapterInfo]) -> None:
        del self._loading[key]
        if not done.cancelled():
            # Its error is retrieved here, because every caller may have been cancelled.
            done.exception()

    def check_adapter_name(self, name: str, base: str) -> None:
        """Raise InvalidRequestError if an adapter of a model cannot have this name."""
        if self.names.names_of(name):
            raise InvalidRequestError(
                f"{name!r} is the name of a model; give the adapter another name.", param="name"
            )
        info = self.names.known.get(name)
        if info is not None and info.model != base:
            raise taken(info)
