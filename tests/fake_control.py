"""Control of a scripted engine: it remembers what it was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from mlx_parallm.engine.control import EngineControl, PauseMode
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.types.errors import NotFoundError, ParallmError, VersionMismatchError
from mlx_parallm.types.request import WeightsVersion


class FakeControl(EngineControl):
    """Remembers what it was asked; ``calls`` has the name and arguments of each command."""

    def __init__(self) -> None:
        self.watchers = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refusal: ParallmError | None = None
        self.digests: list[str | None] = []
        self.weights = WeightsVersion()
        self.sleep_level = 0
        self._asleep: set[str] = set()
        self._adapters: dict[str, AdapterInfo] = {}
        self._mode: PauseMode | None = None

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    def adapters(self) -> Sequence[AdapterInfo]:
        return list(self._adapters.values())

    def unloaded(self) -> Sequence[str]:
        return ()

    async def look(self) -> Sequence[AdapterInfo]:
        return self.adapters()

    def first_name(self, model: str | None) -> str:
        return "org/fake" if model in (None, "alias") else str(model)

    async def checksums(self, model: str | None = None) -> Mapping[str, str]:
        self._note("checksums", model=model)
        return {"a": self.weights.content, "b": "same"}

    async def load_adapter(self, upload: AdapterUpload, *, model: str | None = None) -> AdapterInfo:
        self._note("load_adapter", upload=upload, model=model)
        known = self._adapters.get(upload.name)
        version = None if known is None else known.version
        if upload.expected_version not in (None, version):
            raise VersionMismatchError("Another version.", param="expected_version")
        return self._put(upload.name, upload.version, upload.weights.digest, upload.source)

    async def load_adapter_folder(self, name: str, path: str, **options: Any) -> AdapterInfo:
        self._note("load_adapter_folder", name=name, path=path, **options)
        known = self._adapters.get(name)
        if options.get("expected_version") not in (None, known and known.version):
            raise VersionMismatchError("Another version.", param="expected_version")
        return self._put(name, options.get("version"), path, path)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        self._note("unload_adapter", name=name)
        if name not in self._adapters:
            raise NotFoundError(f"The adapter {name!r} is not loaded.", param="name")
        return self._adapters.pop(name)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> int:
        self._note("pause", mode=mode, clear_cache=clear_cache)
        self._mode = mode
        return 3

    async def resume(self) -> None:
        self._note("resume")
        self._mode = None

    async def reset_prefix_cache(
        self, *, reset_running: bool = False, reset_external: bool = True
    ) -> None:
        self._note("reset_prefix_cache", reset_running=reset_running, reset_external=reset_external)

    async def update_weights(
        self,
        update: WeightsUpdate,
        *,
        model: str | None = None,
        digest: Future[str | None] | None = None,
    ) -> WeightsVersion:
        self.digests.append(None if digest is None else digest.result())
        self._note("update_weights", update=update, model=model)
        return self._new_version(update.version, update.expected_version)

    async def update_weights_from_folder(
        self,
        path: str,
        *,
        model: str | None = None,
        version: str | None = None,
        expected_version: str | None = None,
    ) -> WeightsVersion:
        self._note("update_weights_from_folder", path=path, model=model, version=version)
        return self._new_version(version, expected_version)

    async def set_version(self, label: str, *, model: str | None = None) -> WeightsVersion:
        self._note("set_version", label=label, model=model)
        return self._new_version(label, None)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        self._note("sleep", level=level, mode=mode)
        self._mode = mode
        self.sleep_level = level
        self._asleep = {"weights", "kv_cache"} if level else set()

    async def wake_up(self, tags: Sequence[str] | None = None) -> Sequence[str]:
        self._note("wake_up", tags=tags)
        self._asleep -= set(tags or self._asleep)
        if not self._asleep:
            self.sleep_level = 0
            self._mode = None
        return sorted(self._asleep)

    def version(self, model: str | None = None) -> WeightsVersion:
        return (
            self.weights
            if self.first_name(model) == "org/fake"
            else WeightsVersion(label=f"of {model}")
        )

    def _new_version(self, label: str | None, expected: str | None) -> WeightsVersion:
        if expected not in (None, self.weights.label):
            raise VersionMismatchError("Another version.", param="expected_version")
        self.weights = WeightsVersion("new", label or "1")
        return self.weights

    def _put(self, name: str, version: str | None, digest: str, source: str | None) -> AdapterInfo:
        info = AdapterInfo(
            name=name,
            model="org/fake",
            version=version or "1",
            digest=digest,
            rank=4,
            num_bytes=64,
            created=1,
            source=source,
        )
        self._adapters[name] = info
        return info

    def _note(self, command: str, /, **arguments: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append((command, arguments))
