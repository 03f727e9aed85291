"""The commands of an operator to a running engine: adapters, pauses, weights, sleep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.types.weights import WeightsVersion


class PauseMode(StrEnum):
    """How a pause treats the requests; the names are vLLM's.

    keep: they stay where they are, and new ones wait with them.
    wait: they end first; new ones are refused.
    abort: they end at once, with what they have; new ones are refused.
    """

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class EngineControl(Protocol):
    """Commands that are carried out between two steps; each returns once it is done."""

    @property
    def sleep_level(self) -> int:
        """Return the level of the latest ``sleep``; 0 while awake."""
        ...

    @property
    def is_paused(self) -> bool:
        """True if no step begins until ``resume``."""
        ...

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters of all models, as of the latest change of one."""
        ...

    async def look(self) -> Sequence[AdapterInfo]:
        """Return ``adapters`` as they are now: slots and running counts change with every step."""
        ...

    async def checksums(self, model: str | None = None) -> Mapping[str, str]:
        """Return the SHA-256 of each weight of a model, in hex by name; default: the first model.

        No model begins a step meanwhile.
        """
        ...

    async def load_adapter(self, upload: AdapterUpload, *, model: str | None = None) -> AdapterInfo:
        """Serve an adapter of a model, the first one by default.

        Raises:
            VersionMismatchError: another version is there than was expected.
            InvalidRequestError: it does not fit the model, its name is taken, or there is no room.
            OverloadedError: there will be room once requests have ended.
        """
        ...

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
        ...

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Admit no more requests of an adapter; raise NotFoundError."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> int:
        """Begin no more steps; return how many requests are kept, or were aborted."""
        ...

    async def resume(self) -> None:
        """Go on, if it was paused."""
        ...

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> None:
        """Find nothing again that was computed before."""
        ...

    async def update_weights(
        self, update: WeightsUpdate, *, model: str | None = None
    ) -> WeightsVersion:
        """Replace weights of a model, the first one by default, between two steps.

        Raises:
            VersionMismatchError: another version is there than was expected.
            InvalidRequestError: they do not fit, or hold numbers that are not finite.
        """
        ...

    async def update_weights_from_folder(
        self,
        path: str,
        *,
        model: str | None = None,
        version: str | None = None,
        expected_version: str | None = None,
    ) -> WeightsVersion:
        """``update_weights`` of a checkpoint below a root that the configuration allows."""
        ...

    async def set_version(self, label: str, *, model: str | None = None) -> WeightsVersion:
        """Call the weights of a model something else, from the next token on."""
        ...

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, and give back memory: level 0 none, 1 that of KV, 2 that of weights too.

        Requests that are kept are computed anew after ``wake_up``. At level 2 weights are read
        again from the folder that was loaded last.
        """
        ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> Sequence[str]:
        """Allocate memory again; return the tags that still sleep. If none does, resume.

        A server that was paused before it slept stays paused.

        ``tags`` are of "weights" and "kv_cache"; None is both.
        """
        ...

    def version(self, model: str | None = None) -> WeightsVersion:
        """Return the version of a model's weights; default: the first model."""
        ...
