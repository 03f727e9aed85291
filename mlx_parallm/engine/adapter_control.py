"""The adapters of all models by their names, whatever their models do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count

from mlx_parallm.config import AdapterConfig
from mlx_parallm.engine.adapter_folders import AdapterFolders
from mlx_parallm.engine.adapter_names import AdapterNames
from mlx_parallm.engine.commands import EngineDoor
from mlx_parallm.engine.control_metrics import ADAPTER, ControlMetrics
from mlx_parallm.engine.engine_commands import (
    BeginAdapter,
    CommitAdapter,
    DropStagedAdapter,
    EnsureAdapter,
    ListVersions,
    LoadedVersions,
    StageAdapterPart,
    UnloadAdapter,
    taken,
)
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.types.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    ParallmError,
)
from mlx_parallm.types.weights import WeightsVersion


class AdapterControl:
    """Loads and finds adapters. Lives on the event loop.

    Attributes:
        names: finds adapters by name, as the engine thread had them after the latest change.
        versions: of the models' weights, by first names.
        sleep_level: of the latest ``sleep``; 0 while awake.
    """

    def __init__(self, door: EngineDoor, config: AdapterConfig, metrics: ControlMetrics) -> None:
        self._door = door
        self._metrics = metrics
        self._folders = AdapterFolders(config)
        self.sleep_level = 0
        self.names = AdapterNames(door, self._folders)
        self.versions: Mapping[str, WeightsVersion] = {}
        # Loads of adapters that are found by name, so that many requests share one.
        self._loading: dict[tuple[str, str], asyncio.Future[AdapterInfo]] = {}
        # Number the loads: the commands of one load name its number.
        self._numbers = count()

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters of all models, as of the latest change of one."""
        return self.names.listed()

    async def look(self) -> Sequence[AdapterInfo]:
        """Ask the engine thread first: slots and running counts change with every step."""
        await self.refresh()
        return self.adapters()

    async def refresh(self) -> None:
        """Ask the engine thread which adapters and versions it has."""
        self._note_loaded(await self._door.call(ListVersions()))

    def _note_loaded(self, loaded: LoadedVersions) -> None:
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

    async def read_named(self, name: str) -> AdapterUpload:
        """Return an adapter of the directory of adapters by name; raise ModelNotFoundError."""
        weights, source = await self._folders.read_named(name)
        return AdapterUpload(name=name, weights=weights, source=source)

    async def load_adapter(self, upload: AdapterUpload, *, model: str | None = None) -> AdapterInfo:
        """Serve an adapter of a model, the first one by default.

        Raises:
            VersionMismatchError: another version is there than was expected.
            InvalidRequestError: it does not fit the model, its name is taken, or there is no room.
            OverloadedError: there will be room once requests have ended.
        """
        base = self._adapted(model)
        self._check_name(upload.name, base)
        # The load is completed even if its caller is cancelled.
        with self._metrics.timed(ADAPTER):
            return await asyncio.shield(asyncio.ensure_future(self._load(upload, base)))

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
        info = self.names.find(name)
        if info is None:
            raise NotFoundError(f"The adapter {name!r} is not loaded.", param="name")
        gone = await self._door.call(UnloadAdapter(info.name, info.model))
        await self.refresh()
        return gone

    async def _load(self, upload: AdapterUpload, base: str) -> AdapterInfo:
        """Upload an adapter into a slot in parts, between steps, and then let requests use it."""
        number = next(self._numbers)
        begin = BeginAdapter(number, upload, base, takes_slot=not self.sleep_level)
        async with self._door.hold(base):
            try:
                has_more = await self._door.call(begin)
                while has_more:
                    has_more = await self._door.call(StageAdapterPart(number))
                info, versions = await self._door.call(CommitAdapter(number))
            except ParallmError:
                # With several engines, some may have prepared the adapter.
                await self._door.call(DropStagedAdapter(number))
                raise
        self._note_loaded(versions)
        return self.names.known.get(info.name, info)

    async def _load_by_name(self, name: str, base: str) -> AdapterInfo:
        self._check_name(name, base)
        upload = await self.read_named(name)
        async with self._door.hold(base):
            info = await self._door.call(EnsureAdapter(upload, base))
        await self.refresh()
        return info

    def _end_loading(self, key: tuple[str, str], done: asyncio.Future[AdapterInfo]) -> None:
        del self._loading[key]
        if not done.cancelled():
            # Its error is retrieved here, because every caller may have been cancelled.
            done.exception()

    def _adapted(self, model: str | None) -> str:
        """Return the first name of a model; None means the first model."""
        if model is None:
            return self.names.first_base()
        names = self.names.names_of(model)
        if not names:
            raise ModelNotFoundError(model)
        return names[0]

    def _check_name(self, name: str, base: str) -> None:
        if self.names.names_of(name):
            raise InvalidRequestError(
                f"{name!r} is the name of a model; give the adapter another name.", param="name"
            )
        info = self.names.known.get(name)
        if info is not None and info.model != base:
            raise taken(info)
