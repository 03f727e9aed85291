"""The commands of an operator to a running engine: adapters, pauses, weights, sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from mlx_parallm.adapters.formats import is_adapter_folder
from mlx_parallm.config import AdapterConfig
from mlx_parallm.engine.adapter_control import AdapterControl
from mlx_parallm.engine.changes import (
    ChangesHere,
    EmptyCaches,
    LabelWeights,
    Models,
    PauseMode,
    PauseServer,
    ReplaceWeights,
    ResumeServer,
    SleepServer,
    WakeServer,
)
from mlx_parallm.engine.commands import EngineDoor
from mlx_parallm.engine.control_metrics import WEIGHTS, ControlMetrics
from mlx_parallm.engine.engine_commands import (
    Pause,
    ReadChecksums,
    Resume,
    SleepModels,
    WakeModels,
)
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.models import ModelMemory
from mlx_parallm.engine.status import EngineReport
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError, PausedError
from mlx_parallm.types.request import SLEEP_TAGS, WeightsVersion

# SLEEP_LEVELS: see ``EngineControl.sleep``.
SLEEP_LEVELS = (0, 1, 2)


class Watcher(Protocol):
    """Is notified, on the event loop, of an operator's commands that change what is computed."""

    def on_sleep(self) -> None:
        """Note that memory is about to be freed."""
        ...

    def on_wake(self) -> None:
        """Note that all memory is allocated again."""
        ...

    def on_weights(self, model: str) -> None:
        """Note that the weights of a model were replaced."""
        ...

    def on_unload(self, model: str) -> None:
        """Note that a model was unloaded."""
        ...

    def needs(self, model: str) -> bool:
        """True if a model must stay in memory, though no request of it is open.

        By default none must.
        """
        del model
        return False


class EngineControl(AdapterControl):
    """Commands that are carried out between two steps; each returns once it is done.

    Lives on the event loop.

    Attributes:
        watchers: are notified of what changes.
        on_changed: called with the first name of a model whose weights were replaced, and the
            folder that all come from; None for tensors.
        on_forgotten: called once the engine thread was started anew, without any change.
        models: loads and unloads models.
        replacing: is held from the preparation of new weights to their commit.
    """

    models: Models

    def __init__(self, door: EngineDoor, config: AdapterConfig, metrics: ControlMetrics) -> None:
        super().__init__(door, config, metrics)
        self.here = self.changes = ChangesHere(self)
        self.watchers: list[Watcher] = []
        self.on_changed: Callable[[str, Path | None], None] = lambda _name, _folder: None
        self.on_forgotten: Callable[[], None] = lambda: None
        self._pause: PauseMode | None = None
        # True if it was paused before it slept.
        self._stays_paused = False
        self.replacing = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """True if no step begins until ``resume``."""
        return self._pause is not None

    def report(
        self,
        memory: Mapping[str, ModelMemory],
        engines: Sequence[EngineReport],
        running: Set[str],
    ) -> None:
        """Bring the metrics up to date; ``memory`` is by model, ``running`` names adapters."""
        requested = {each.adapter for each in self.door.open_requests() if each.adapter}
        self._metrics.on_requests(running, requested - running)
        self._metrics.on_memory(memory)
        self._metrics.on_engines(engines)
        names = [status.names[0] for status in self.door.statuses() if status.can_change]
        self._metrics.on_versions(self.adapters(), {name: self.version(name) for name in names})
        self._metrics.on_state(is_paused=self.is_paused, sleep_level=self.sleep_level)

    async def checksums(self, model: str | None = None) -> Mapping[str, str]:
        """Return the SHA-256 of each weight of a model, in hex by name; default: the first model.

        No model begins a step meanwhile.
        """
        name = self.first_name(model)
        async with self.door.hold(name):
            return await self.door.call(ReadChecksums(name))

    def version(self, model: str | None = None) -> WeightsVersion:
        """Return the version of a model's weights; default: the first model."""
        return self.versions.get(self.first_name(model), WeightsVersion())

    def check_open(self) -> None:
        """Raise PausedError if no requests are admitted for a pause."""
        if self._pause not in (None, PauseMode.KEEP):
            raise PausedError

    def forget(self) -> None:
        """Forget all adapters, versions and pauses: the engine thread was started anew."""
        # They are replaced, not emptied: the event loop may be iterating over them.
        self.names.known, self.versions = {}, {}
        self._pause = None
        self._note_awake()
        self.on_forgotten()

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> int:
        """Begin no more steps; return how many requests are kept, or were aborted."""
        return await self.changes.apply(PauseServer(mode, clear_cache))

    async def pause_here(self, mode: PauseMode) -> int:
        """``pause`` this server."""
        self._pause = mode
        count = 0
        if mode is PauseMode.WAIT and not self.sleep_level:
            # Requests that an earlier pause kept must end too.
            await self.door.call(Resume())
            await self.door.wait_until_idle()
        elif mode is PauseMode.ABORT:
            count = await self.door.cancel_all()
        if not self.is_paused:
            # It was resumed while this waited.
            return count
        kept = await self.door.call(Pause())
        return count or kept

    def check_awake(self) -> None:
        """Raise InvalidRequestError while memory is released."""
        if self.sleep_level:
            raise InvalidRequestError("The server is asleep; wake it up first.")

    async def resume(self) -> None:
        """Let steps begin again after a pause."""
        await self.changes.apply(ResumeServer())

    async def resume_here(self) -> None:
        """``resume`` this server."""
        self.check_awake()
        self._pause = None
        await self.door.call(Resume())

    async def reset_prefix_cache(
        self, *, reset_running: bool = False, reset_external: bool = True
    ) -> None:
        """Forget cached results and KV; ``reset_running`` also recomputes running requests.

        ``reset_external``: also forget KV in host memory and on disk.
        """
        await self.changes.apply(EmptyCaches(reset_running, reset_external))

    async def update_weights(
        self,
        update: WeightsUpdate,
        *,
        model: str | None = None,
        digest: Future[str | None] | None = None,
    ) -> WeightsVersion:
        """Replace weights of a model, the first one by default, between two steps.

        ``digest`` is that of the tensors. The update never waits for it: if it is not known in
        time, equal weights that come again share no KV with these.

        Raises:
            VersionMismatchError: another version is there than was expected.
            InvalidRequestError: they do not fit, or hold numbers that are not finite.
        """
        change = ReplaceWeights(self.first_name(model), update, digest)
        # The update is completed even if its caller is cancelled.
        with self._metrics.timed(WEIGHTS):
            return await asyncio.shield(asyncio.ensure_future(self.changes.apply(change)))

    async def note_weights(self, model: str) -> None:
        """Note, and notify the watchers, that weights of a model were replaced."""
        await self.refresh()
        for watcher in self.watchers:
            watcher.on_weights(model)

    def checkpoint_folder(self, path: str) -> Path:
        """Return the folder of a path; raise InvalidRequestError or NotFoundError."""
        folder = self._folders.resolve(path, param="path")
        if is_adapter_folder(folder):
            # SGLang and vLLM have no name to serve it under here either; see docs/weights.md.
            raise InvalidRequestError(
                f"{path[:200]!r} has an adapter, not the weights of a whole model. Load it under "
                "its own name with /load_lora_adapter.",
                param="path",
            )
        return folder

    async def update_weights_from_folder(
        self,
        path: str,
        *,
        model: str | None = None,
        version: str | None = None,
        expected_version: str | None = None,
    ) -> WeightsVersion:
        """``update_weights`` of a checkpoint below a root that the configuration allows."""
        folder = self.checkpoint_folder(path)
        update = WeightsUpdate(folder=folder, version=version, expected_version=expected_version)
        return await self.update_weights(update, model=model)

    async def set_version(self, label: str, *, model: str | None = None) -> WeightsVersion:
        """Give the version of a model's weights another label, from the next token on."""
        return await self.changes.apply(LabelWeights(self.first_name(model), label))

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, and free memory: none at level 0, that of KV at 1, that of weights too at 2.

        Requests that are kept are computed anew after ``wake_up``. At level 2 weights are read
        again from the folder that was loaded last.
        """
        if level not in SLEEP_LEVELS:
            raise InvalidRequestError("level must be 0, 1 or 2.", param="level")
        await self.changes.apply(SleepServer(level, mode))

    async def sleep_here(self, level: int, mode: PauseMode) -> None:
        """Let this server ``sleep``."""
        was_paused = self.is_paused
        await self.pause_here(mode)
        if level:
            if not self.sleep_level:
                self._stays_paused = was_paused
            self.sleep_level = level
            for watcher in self.watchers:
                watcher.on_sleep()
            await self.door.call(SleepModels(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> Sequence[str]:
        """Allocate memory again; return the tags that are still asleep. If none is, resume.

        A server that was paused before it slept stays paused.

        ``tags`` are of "weights" and "kv_cache"; None is both.
        """
        wanted = SLEEP_TAGS if tags is None else tuple(tags)
        unknown = [tag for tag in wanted if tag not in SLEEP_TAGS]
        if unknown:
            raise InvalidRequestError(
                f"tags must be among {', '.join(SLEEP_TAGS)}, not {unknown[0]!r}.", param="tags"
            )
        return await self.changes.apply(WakeServer(wanted))

    async def wake_here(self, tags: Sequence[str]) -> Sequence[str]:
        """``wake_up`` this server."""
        asleep: Sequence[str] = await self.door.call(WakeModels(tags))
        if not asleep:
            self._note_awake()
            stays_paused, self._stays_paused = self._stays_paused, False
            if not stays_paused:
                await self.resume_here()
        await self.refresh()
        return asleep

    def is_needed(self, model: str) -> bool:
        """True if a watcher needs a model in memory."""
        return any(watcher.needs(model) for watcher in self.watchers)

    def note_unloaded(self, model: str) -> None:
        """Notify the watchers that a model was unloaded."""
        for watcher in self.watchers:
            watcher.on_unload(model)

    def _note_awake(self) -> None:
        self.sleep_level = 0
        for watcher in self.watchers:
            watcher.on_wake()

    def first_name(self, model: str | None) -> str:
        """Return the first name of a model whose weights can change; None means the first one."""
        if model is None:
            changeable = [status for status in self.door.statuses() if status.can_change]
            if not changeable:
                raise InvalidRequestError(
                    "No model whose weights can be changed is served here.", param="model"
                )
            return changeable[0].names[0]
        status = self.door.status_of(model)
        if status is None:
            raise ModelNotFoundError(model)
        if not status.can_change:
            why = "is being loaded." if status.model is None else status.model.traits.refuses_change
            raise InvalidRequestError(f"{model} {why}", param="model")
        return status.names[0]
