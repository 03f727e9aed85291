"""``EngineControl`` on the event loop's side: commands to the engine thread, and what they left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mlx_parallm.adapters.folder import is_adapter_folder
from mlx_parallm.config import AdapterConfig
from mlx_parallm.engine.adapter_control import AdapterControl, EngineThread
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.control_metrics import WEIGHTS, ControlMetrics
from mlx_parallm.engine.host_commands import (
    CommitUpdate,
    DropUpdate,
    Pause,
    PrepareUpdate,
    ReadChecksums,
    RelabelWeights,
    ResetCaches,
    Resume,
    SleepModels,
    WakeModels,
)
from mlx_parallm.engine.interface import ModelMemory
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.state import SlotCounts
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError, PausedError
from mlx_parallm.types.weights import SLEEP_TAGS, WeightsVersion


class AsyncControl(AdapterControl):
    """Implements ``EngineControl``."""

    def __init__(
        self, thread: EngineThread, config: AdapterConfig, metrics: ControlMetrics
    ) -> None:
        super().__init__(thread, config, metrics)
        self._pause: PauseMode | None = None
        # True if it was paused before it slept.
        self._stays_paused = False
        # Held from the preparation of new weights to their commit.
        self._replacing = asyncio.Lock()

    @property
    def sleep_level(self) -> int:
        """See ``EngineControl.sleep_level``."""
        return self._sleep_level

    @property
    def is_paused(self) -> bool:
        """See ``EngineControl.is_paused``."""
        return self._pause is not None

    def report(self, slots: Mapping[str, SlotCounts]) -> None:
        """Bring the metrics up to date; ``slots`` are by model."""
        names = [names[0] for names in self._thread.changeable()]
        self._metrics.on_versions(self.adapters(), {name: self.version(name) for name in names})
        self._metrics.on_state(is_paused=self.is_paused, sleep_level=self.sleep_level, slots=slots)

    def report_memory(self, memory: Mapping[str, ModelMemory]) -> None:
        """Bring the metrics of memory up to date."""
        self._metrics.on_memory(memory)

    async def checksums(self, model: str | None = None) -> Mapping[str, str]:
        """See ``EngineControl.checksums``."""
        return await self._thread.call(ReadChecksums(self._base(model)))

    def version(self, model: str | None = None) -> WeightsVersion:
        """See ``EngineControl.version``."""
        return self._versions.get(self._base(model), WeightsVersion())

    def check_open(self) -> None:
        """Raise PausedError if no requests are admitted for a pause."""
        if self._pause not in (None, PauseMode.KEEP):
            raise PausedError

    def forget(self) -> None:
        """Forget all adapters, versions and pauses: the engine thread was started anew."""
        # They are replaced, not emptied: the event loop may be iterating over them.
        self._adapters, self._versions = {}, {}
        self._pause = None
        self._sleep_level = 0

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> int:
        """See ``EngineControl.pause``."""
        self._pause = mode
        count = 0
        if mode is PauseMode.WAIT and not self._sleep_level:
            # Requests that an earlier pause kept must end too.
            await self._thread.call(Resume())
            await self._thread.wait_until_idle()
        elif mode is PauseMode.ABORT:
            count = await self._thread.cancel_all()
        if not self.is_paused:
            # It was resumed while this waited.
            return count
        kept = await self._thread.call(Pause())
        if clear_cache:
            await self.reset_prefix_cache()
        return count or kept

    async def resume(self) -> None:
        """See ``EngineControl.resume``."""
        if self._sleep_level:
            raise InvalidRequestError("The server is asleep; wake it up first.")
        self._pause = None
        await self._thread.call(Resume())

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> None:
        """See ``EngineControl.reset_prefix_cache``."""
        await self._thread.call(ResetCaches(reset_running))

    async def update_weights(
        self, update: WeightsUpdate, *, model: str | None = None
    ) -> WeightsVersion:
        """See ``EngineControl.update_weights``."""
        # The update is completed even if its caller is cancelled.
        with self._metrics.timed(WEIGHTS):
            change = self._replace_weights(self._base(model), update)
            version = await asyncio.shield(asyncio.ensure_future(change))
        await self.refresh()
        return version

    async def _replace_weights(self, model: str, update: WeightsUpdate) -> WeightsVersion:
        async with self._replacing:
            try:
                await self._thread.call(PrepareUpdate(model, update))
                return await self._thread.call(CommitUpdate(model))
            except BaseException:
                # With several engines, some may have prepared it.
                await self._thread.call(DropUpdate(model))
                raise

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
                f"{path[:200]!r} has an adapter, not the weights of a whole model. Load it under "
                "its own name with /load_lora_adapter.",
                param="path",
            )
        update = WeightsUpdate(folder=folder, version=version, expected_version=expected_version)
        return await self.update_weights(update, model=model)

    async def set_version(self, label: str, *, model: str | None = None) -> WeightsVersion:
        """See ``EngineControl.set_version``."""
        version = await self._thread.call(RelabelWeights(self._base(model), label))
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
            await self._thread.call(SleepModels(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> Sequence[str]:
        """See ``EngineControl.wake_up``."""
        wanted = SLEEP_TAGS if tags is None else tuple(tags)
        unknown = [tag for tag in wanted if tag not in SLEEP_TAGS]
        if unknown:
            raise InvalidRequestError(
                f"tags must be among {', '.join(SLEEP_TAGS)}, not {unknown[0]!r}.", param="tags"
            )
        asleep: Sequence[str] = await self._thread.call(WakeModels(wanted))
        if not asleep:
            self._sleep_level = 0
            stays_paused, self._stays_paused = self._stays_paused, False
            if not stays_paused:
                await self.resume()
        await self.refresh()
        return asleep

    def _base(self, model: str | None) -> str:
        """Return the first name of a model whose weights can change; None means the first one."""
        changeable = self._thread.changeable()
        if model is None:
            if not changeable:
                raise InvalidRequestError(
                    "No model whose weights can be changed is served here.", param="model"
                )
            return changeable[0][0]
        for names in changeable:
            if model in names:
                return names[0]
        if self._names(model):
            raise self._thread.refuse_change(model)
        raise ModelNotFoundError(model)


SLEEP_LEVELS = (0, 1, 2)
