"""``EngineControl`` on the event loop's side: commands to the engine thread, and what they left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mlx_parallm.adapters.folder import is_adapter_folder
from mlx_parallm.config import AdapterConfig
from mlx_parallm.engine import host_actions
from mlx_parallm.engine.adapter_folders import MAX_NAME, AdapterFolders
from mlx_parallm.engine.adapter_reader import AdapterReader
from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.commands import EngineHost
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.control_metrics import ADAPTER, WEIGHTS, ControlMetrics
from mlx_parallm.engine.encoder_interface import ModelMemory
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.engine.live_weights import SLEEP_TAGS, WeightsUpdate
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError, NotFoundError, PausedError
from mlx_parallm.scheduler.adapter_slots import AdapterSlots
from mlx_parallm.weights import WeightsVersion


class EngineThread(Protocol):
    """What this needs of the engine that it controls."""

    def models(self) -> Sequence[ServedModel]:
        """The loaded models."""
        ...

    def first_model(self) -> ServedModel:
        """The first of them; raise InvalidRequestError if there is none."""
        ...

    def is_encoder(self, name: str) -> bool:
        """Whether an encoder has this name."""
        ...

    async def call(self, action: Callable[[EngineHost], Any]) -> Any:
        """What an action between two steps gives; raise its error."""
        ...

    async def cancel_all(self) -> int:
        """End every request with what it has; how many there were."""
        ...

    async def wait_until_idle(self) -> None:
        """Return once no request is open."""
        ...


class AsyncControl:
    """Implements ``EngineControl``."""

    def __init__(
        self, thread: EngineThread, config: AdapterConfig, metrics: ControlMetrics
    ) -> None:
        self._thread = thread
        self._metrics = metrics
        self._folders = AdapterFolders(config)
        self._reader = AdapterReader(self._folders)
        self._pause: PauseMode | None = None
        self._sleep_level = 0
        # Whether it was paused before it slept.
        self._stays_paused = False
        # By name, as the engine thread had them after the latest change.
        self._adapters: dict[str, AdapterInfo] = {}
        self._versions: Mapping[str, WeightsVersion] = {}
        # Loads of adapters that are found by name, so that many requests share one.
        self._loading: dict[str, asyncio.Future[AdapterInfo]] = {}

    @property
    def sleep_level(self) -> int:
        """See ``EngineControl.sleep_level``."""
        return self._sleep_level

    @property
    def is_paused(self) -> bool:
        """See ``EngineControl.is_paused``."""
        return self._pause is not None

    def adapters(self) -> Sequence[AdapterInfo]:
        """See ``EngineControl.adapters``."""
        return list(self._adapters.values())

    def report(self, slots: Mapping[str, AdapterSlots]) -> None:
        """Bring the metrics up to date; ``slots`` are by model."""
        names = [one.names[0] for one in self._thread.models()]
        self._metrics.on_versions(self.adapters(), {name: self.version(name) for name in names})
        self._metrics.on_state(is_paused=self.is_paused, sleep_level=self.sleep_level, slots=slots)

    def report_memory(self, memory: Mapping[str, ModelMemory]) -> None:
        """Bring the metrics of memory up to date."""
        self._metrics.on_memory(memory)

    async def look(self) -> Sequence[AdapterInfo]:
        """See ``EngineControl.look``."""
        await self.refresh()
        return self.adapters()

    async def checksums(self, model: str | None = None) -> Mapping[str, str]:
        """See ``EngineControl.checksums``."""
        return await self._call(
            self._base(model), lambda engine: host_actions.live_weights(engine).checksums()
        )

    def version(self, model: str | None = None) -> WeightsVersion:
        """See ``EngineControl.version``."""
        return self._versions.get(self._base(model), WeightsVersion())

    def check_open(self) -> None:
        """Raise PausedError if no requests are admitted for a pause."""
        if self._pause not in (None, PauseMode.KEEP):
            raise PausedError("Generation is paused.")

    def forget(self) -> None:
        """The engine thread was started anew: whatever was loaded into it is gone."""
        # Not emptied: the event loop may be going through them.
        self._adapters, self._versions = {}, {}
        self._pause = None
        self._sleep_level = 0

    def find(self, name: str) -> AdapterInfo | None:
        """The loaded adapter that requests call by this name, or by "model:name"."""
        if name in self._adapters:
            return self._adapters[name]
        for info in self._adapters.values():
            if any(f"{alias}:{info.name}" == name for alias in self._names(info.model)):
                return info
        return None

    def served(self, name: str) -> ServedModel | None:
        """An adapter as a model, loaded or to be loaded with its first request; None if neither."""
        info = self.find(name)
        if info is not None:
            return self._as_model(info.name, info.model, info.source)
        model, _, short = name.rpartition(":")
        base = model if any(model in one.names for one in self._thread.models()) else None
        source = self._folders.find(short if base else name)
        if source is None:
            return None
        return self._as_model(short if base else name, self._base(base), str(source))

    async def ensure_loaded(self, name: str, base: str) -> None:
        """Load an adapter of a model that was found by its name, unless it is there.

        Raises:
            ModelNotFoundError: there is none.
            InvalidRequestError: it cannot be used.
        """
        if name in self._adapters:
            return
        if name not in self._loading:
            loading = asyncio.ensure_future(self._load_by_name(name, base))
            self._loading[name] = loading
            loading.add_done_callback(lambda done: self._end_loading(name, done))
        # Who waits may go away; others wait too.
        await asyncio.shield(self._loading[name])

    async def read_named(self, name: str) -> AdapterUpload:
        """The adapter that is found by its name; raise ModelNotFoundError."""
        weights, source = await self._reader.read_named(name)
        return AdapterUpload(name=name, weights=weights, source=source)

    async def load_adapter(self, upload: AdapterUpload, *, model: str | None = None) -> AdapterInfo:
        """See ``EngineControl.load_adapter``."""
        base = self._base(model)
        self._check_name(upload.name, base)
        # Who asked for it may go away: what was begun is ended.
        with self._metrics.timed(ADAPTER):
            return await asyncio.shield(asyncio.ensure_future(self._load(upload, base)))

    async def _load(self, upload: AdapterUpload, base: str) -> AdapterInfo:
        """Put it into a slot in parts, between steps, and then let requests use that."""
        staging = AdapterStaging(upload, in_parts=not self._sleep_level)

        def advance(host: EngineHost) -> tuple[AdapterInfo, host_actions.Loaded] | None:
            info = staging.advance(host.engines[base].policies)
            return None if info is None else (info, host_actions.loaded(host))

        done: tuple[AdapterInfo, host_actions.Loaded] | None = None
        while done is None:
            done = await self._thread.call(advance)
        info, loaded = done
        self._note(loaded)
        return self._adapters.get(info.name, info)

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
        """See ``EngineControl.load_adapter_folder``."""
        weights, source = await self._reader.read(path)
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
        """See ``EngineControl.unload_adapter``."""
        info = self.find(name)
        if info is None:
            raise NotFoundError(f"The adapter {name!r} is not loaded.", param="name")
        gone = await self._call(info.model, lambda engine: engine.policies.unload(info.name))
        await self.refresh()
        return gone

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> int:
        """See ``EngineControl.pause``."""
        self._pause = mode
        count = 0
        if mode is PauseMode.WAIT and not self._sleep_level:
            # What an earlier pause has kept is to end too.
            await self._thread.call(host_actions.resume)
            await self._thread.wait_until_idle()
        elif mode is PauseMode.ABORT:
            count = await self._thread.cancel_all()
        if self._pause is None:
            # Somebody resumed while this waited.
            return count
        kept = await self._thread.call(host_actions.pause)
        if clear_cache:
            await self.reset_prefix_cache()
        return count or kept

    async def resume(self) -> None:
        """See ``EngineControl.resume``."""
        if self._sleep_level:
            raise InvalidRequestError("The server sleeps: wake it up first.")
        self._pause = None
        await self._thread.call(host_actions.resume)

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> None:
        """See ``EngineControl.reset_prefix_cache``."""

        def reset(host: EngineHost) -> None:
            for engine in host.engines.values():
                host.deliver(engine.settle())
                engine.reset_prefix_cache(reset_running=reset_running)

        await self._thread.call(reset)

    async def update_weights(
        self, update: WeightsUpdate, *, model: str | None = None
    ) -> WeightsVersion:
        """See ``EngineControl.update_weights``."""

        def replace_weights(host: EngineHost) -> WeightsVersion:
            engine = host.engines[base]
            # Its tokens are those of the old weights.
            host.deliver(engine.settle())
            return host_actions.live_weights(engine).update(update)

        base = self._base(model)
        with self._metrics.timed(WEIGHTS):
            version = await self._thread.call(replace_weights)
        await self.refresh()
        return version

    async def update_weights_from_folder(
        self,
        path: str,
        *,
        model: str | None = None,
        version: str | None = None,
        expected_version: str | None = None,
    ) -> WeightsVersion:
        """See ``EngineControl.update_weights_from_folder``."""
        folder = self._folders.resolve(path, param="path")
        if is_adapter_folder(folder):
            # SGLang and vLLM have no name to serve it under here either; see docs/weights.md.
            raise InvalidRequestError(
                f"{path[:200]!r} has an adapter, not the weights of a whole model: load it under "
                "a name of its own with /load_lora_adapter.",
                param="path",
            )
        update = WeightsUpdate(folder=folder, version=version, expected_version=expected_version)
        return await self.update_weights(update, model=model)

    async def set_version(self, label: str, *, model: str | None = None) -> WeightsVersion:
        """See ``EngineControl.set_version``."""
        version = await self._call(
            self._base(model), lambda engine: host_actions.live_weights(engine).relabel(label)
        )
        await self.refresh()
        return version

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """See ``EngineControl.sleep``."""
        if level not in SLEEP_LEVELS:
            raise InvalidRequestError("level must be 0, 1 or 2.", param="level")
        was_paused = self.is_paused
        await self.pause(mode)
        if level:
            if not self._sleep_level:
                self._stays_paused = was_paused
            self._sleep_level = level
            await self._thread.call(lambda host: host_actions.sleep(host, level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> Sequence[str]:
        """See ``EngineControl.wake_up``."""
        wanted = SLEEP_TAGS if tags is None else tuple(tags)
        unknown = [one for one in wanted if one not in SLEEP_TAGS]
        if unknown:
            raise InvalidRequestError(
                f"tags must be of {', '.join(SLEEP_TAGS)}, not {unknown[0]!r}.", param="tags"
            )
        asleep: Sequence[str] = await self._thread.call(
            lambda host: host_actions.wake(host, wanted)
        )
        if not asleep:
            self._sleep_level = 0
            stays_paused, self._stays_paused = self._stays_paused, False
            if not stays_paused:
                await self.resume()
        await self.refresh()
        return asleep

    async def _load_by_name(self, name: str, base: str) -> AdapterInfo:
        self._check_name(name, base)
        upload = await self.read_named(name)
        info = await self._call(base, lambda engine: engine.policies.ensure(upload))
        await self.refresh()
        return info

    def _end_loading(self, name: str, done: asyncio.Future[AdapterInfo]) -> None:
        del self._loading[name]
        if not done.cancelled():
            # Perhaps nobody waits for it any more.
            done.exception()

    async def _call(self, model: str, action: Callable[[Engine], Any]) -> Any:
        return await self._thread.call(lambda host: action(host.engines[model]))

    async def refresh(self) -> None:
        """Hear from the engine thread what is loaded."""
        self._note(await self._thread.call(host_actions.loaded))

    def _note(self, loaded: host_actions.Loaded) -> None:
        infos, self._versions = loaded
        self._adapters = {info.name: info for info in infos}

    def _base(self, model: str | None) -> str:
        """The first name of a model, or of the first one."""
        if model is None:
            return self._thread.first_model().names[0]
        for one in self._thread.models():
            if model in one.names:
                return one.names[0]
        if self._thread.is_encoder(model):
            raise InvalidRequestError(
                f"{model} is an encoder: its weights stay as they were loaded.", param="model"
            )
        raise ModelNotFoundError(model)

    def _names(self, base: str) -> tuple[str, ...]:
        return next((one.names for one in self._thread.models() if one.names[0] == base), ())

    def _check_name(self, name: str, base: str) -> None:
        if not name or len(name) > MAX_NAME:
            raise InvalidRequestError(
                f"An adapter's name has 1 to {MAX_NAME} characters.", param="name"
            )
        is_model = any(name in one.names for one in self._thread.models())
        if is_model or self._thread.is_encoder(name):
            raise InvalidRequestError(f"A model is named {name!r}.", param="name")
        info = self._adapters.get(name)
        if info is not None and info.model != base:
            raise InvalidRequestError(
                f"{name!r} is an adapter of {info.model!r}; unload it first.", param="name"
            )

    def _as_model(self, name: str, base: str, source: str | None) -> ServedModel:
        model = next(one for one in self._thread.models() if one.names[0] == base)
        return replace(model, names=(name,), root=source or name, parent=base, adapter=name)


SLEEP_LEVELS = (0, 1, 2)
