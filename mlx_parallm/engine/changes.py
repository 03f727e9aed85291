"""Changes of a server by its operator, as values that are staged, then committed or dropped.

To stage a change checks all of it and prepares it beside what is served; what requests see changes
with the commit alone. So servers that are to change together first stage a change everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from mlx_parallm.engine.adapter_commands import (
    BeginAdapter,
    CommitAdapter,
    DropStagedAdapter,
    FindRoomForStaged,
    LoadedVersions,
    StageAdapterPart,
    UnloadAdapter,
)
from mlx_parallm.engine.commands import EngineDoor
from mlx_parallm.engine.engine_commands import (
    CommitUpdate,
    DropUpdate,
    PrepareUpdate,
    RelabelWeights,
    ResetCaches,
)
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.types.errors import NotFoundError
from mlx_parallm.types.request import WeightsVersion

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
C = TypeVar("C", bound="ServerChange[Any]")

#: ``Steps``: yields None once the change is staged, and its result once it is committed. Closing it
#: after the first drops the change.
Steps = AsyncGenerator[R | None]


class PauseMode(StrEnum):
    """Treatment of running requests by a pause; the names are vLLM's.

    keep: they stay where they are, and new ones wait with them.
    wait: they end first; new ones are refused.
    abort: they end at once, with what they have; new ones are refused.
    """

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class Models(Protocol):
    """Loads and unloads models while the server runs; see ``ModelDirectory``."""

    def is_listed(self, name: str) -> bool:
        """True if a model has this name, loaded or not."""
        ...

    def check_unload(self, name: str) -> None:
        """Raise what ``unload`` would."""
        ...

    async def load(self, load: ModelLoad) -> ModelStatus:
        """Serve one more model; return once it is loaded."""
        ...

    async def unload(self, name: str) -> ModelStatus:
        """Free a model's memory once its requests have ended."""
        ...


class AdapterList(Protocol):
    """Finds loaded adapters by name; see ``AdapterNames``."""

    @property
    def known(self) -> Mapping[str, AdapterInfo]:
        """Return the loaded adapters by name."""
        ...

    def find(self, name: str) -> AdapterInfo | None:
        """Return the loaded adapter of this name; None if there is none."""
        ...


class ChangedServer(Protocol):
    """A server as its changes see it; see ``EngineControl``."""

    door: EngineDoor
    models: Models
    sleep_level: int
    replacing: asyncio.Lock
    on_changed: Callable[[str, Path | None], None]

    @property
    def names(self) -> AdapterList:
        """Return what finds adapters."""
        ...

    @property
    def is_paused(self) -> bool:
        """True if no step begins."""
        ...

    def check_adapter_name(self, name: str, base: str) -> None:
        """Raise InvalidRequestError if an adapter of a model cannot have this name."""
        ...

    def check_awake(self) -> None:
        """Raise InvalidRequestError while memory is released."""
        ...

    def spared(self, model: str, /) -> frozenset[str]:
        """Return adapters of a model that no other one evicts unless a change says so."""
        ...

    def next_number(self) -> int:
        """Return a number for the commands of one load."""
        ...

    def note_loaded(self, loaded: LoadedVersions) -> None:
        """Note which adapters and versions the engine thread has."""
        ...

    async def refresh(self) -> None:
        """Ask the engine thread which adapters and versions it has."""
        ...

    async def note_weights(self, model: str) -> None:
        """Note that weights of a model were replaced."""
        ...

    async def pause_here(self, mode: PauseMode) -> int:
        """Pause; return how many requests are kept, or were aborted."""
        ...

    async def resume_here(self) -> None:
        """Let steps begin again."""
        ...

    async def sleep_here(self, level: int, mode: PauseMode) -> None:
        """Pause, and free memory."""
        ...

    async def wake_here(self, tags: Sequence[str]) -> Sequence[str]:
        """Allocate memory again; return what is still asleep."""
        ...


class ServerChange(Protocol[R_co]):
    """A change of one server."""

    def steps(self, control: ChangedServer, /) -> AsyncGenerator[R_co | None]:
        """Begin it at a server; see ``Steps``."""
        ...

    def labelled(self: C, label: str, /) -> C:
        """Return the change with a label of its version, if it makes one that has none."""
        return self


class Changes(Protocol):
    """Carries out changes: at this server, or at all that change together."""

    async def apply(self, change: ServerChange[R]) -> R:
        """Stage a change, commit it, and return its result.

        Raises:
            ParallmError: what staging raised; nothing has changed.
        """
        ...


class Staged(Generic[R]):
    """A change that is staged at this server."""

    def __init__(self, steps: AsyncGenerator[R | None]) -> None:
        self._steps = steps

    async def commit(self) -> R:
        """Let requests see it; return its result."""
        async with aclosing(self._steps):
            return cast(R, await anext(self._steps))

    async def drop(self) -> None:
        """Forget it."""
        await self._steps.aclose()


async def stage(change: ServerChange[R], control: ChangedServer) -> Staged[R]:
    """Return a change once it is staged; raise what keeps it from being."""
    steps = change.steps(control)
    await anext(steps)
    return Staged(steps)


class ChangesHere:
    """Carries out changes at this server alone."""

    def __init__(self, control: ChangedServer) -> None:
        self._control = control

    async def apply(self, change: ServerChange[R]) -> R:
        """See ``Changes``."""
        return await (await stage(change, self._control)).commit()


@dataclass(frozen=True, slots=True)
class LoadAdapter(ServerChange[AdapterInfo]):
    """Serve an adapter of the model with this first name; see ``Policies.load``.

    ``evicted``: the adapter to evict for it; None leaves that to the engine, if there is no room.
    """

    upload: AdapterUpload
    model: str
    evicted: str | None = None

    def labelled(self, label: str) -> LoadAdapter:
        """See ``ServerChange``."""
        return replace(self, upload=replace(self.upload, version=self.upload.version or label))

    async def steps(self, control: ChangedServer) -> Steps[AdapterInfo]:
        """Upload it into a slot in parts, between steps, and then let requests use it."""
        control.check_adapter_name(self.upload.name, self.model)
        door, number = control.door, control.next_number()
        begin = BeginAdapter(number, self.upload, self.model, takes_slot=not control.sleep_level)
        spared = control.spared(self.model)
        async with door.hold(self.model):
            try:
                has_more = await door.call(begin)
                while has_more:
                    has_more = await door.call(StageAdapterPart(number))
                if spared:
                    # Where several servers stage it, one without room refuses before any commits.
                    await door.call(FindRoomForStaged(number, self.evicted, spared))
                yield None
                commit = CommitAdapter(number, self.evicted, control.spared(self.model))
                info, versions = await door.call(commit)
            except BaseException:
                # With several engines, some may have prepared the adapter.
                await door.call(DropStagedAdapter(number))
                raise
        control.note_loaded(versions)
        yield control.names.known.get(info.name, info)


@dataclass(frozen=True, slots=True)
class RemoveAdapter(ServerChange[AdapterInfo]):
    """Admit no more requests of an adapter.

    ``may_lack``: nothing happens where there is none; the result is None.
    """

    name: str
    may_lack: bool = False

    async def steps(self, control: ChangedServer) -> Steps[AdapterInfo]:
        """See ``ServerChange``."""
        info = control.names.find(self.name)
        if info is None and not self.may_lack:
            raise NotFoundError(f"The adapter {self.name!r} is not loaded.", param="name")
        yield None
        if info is None:
            yield None
            return
        gone = await control.door.call(UnloadAdapter(info.name, info.model))
        await control.refresh()
        yield gone


@dataclass(frozen=True, slots=True)
class ReplaceWeights(ServerChange[WeightsVersion]):
    """Replace weights of the model with this first name.

    ``digest`` is that of the tensors. The change never waits for it: if it is not known in time,
    equal weights that come again share no KV with these.
    """

    model: str
    update: WeightsUpdate
    digest: Future[str | None] | None = None

    def labelled(self, label: str) -> ReplaceWeights:
        """See ``ServerChange``."""
        return replace(self, update=replace(self.update, version=self.update.version or label))

    async def steps(self, control: ChangedServer) -> Steps[WeightsVersion]:
        """Prepare them beside those in use, and compute with them from the next step on."""
        door, model = control.door, self.model
        # An evicted model comes back first; a change of it must not be lost.
        async with control.replacing, door.hold(model):
            try:
                await door.call(PrepareUpdate(model, self.update))
                yield None
                known = self.digest
                digest = known.result() if known is not None and known.done() else None
                version = await door.call(CommitUpdate(model, digest))
            except BaseException:
                # With several engines, some may have prepared the update.
                await door.call(DropUpdate(model))
                raise
            control.on_changed(model, self.update.folder)
        await control.note_weights(model)
        yield version


@dataclass(frozen=True, slots=True)
class LabelWeights(ServerChange[WeightsVersion]):
    """Give the version of a model's weights another label, from the next token on."""

    model: str
    label: str

    async def steps(self, control: ChangedServer) -> Steps[WeightsVersion]:
        """See ``ServerChange``."""
        # An evicted model comes back first, as for an update.
        async with control.door.hold(self.model):
            yield None
            version = await control.door.call(RelabelWeights(self.model, self.label))
        await control.refresh()
        yield version


@dataclass(frozen=True, slots=True)
class PauseServer(ServerChange[int]):
    """Begin no more steps; the result is how many requests are kept, or were aborted."""

    mode: PauseMode
    clear_cache: bool = False

    async def steps(self, control: ChangedServer) -> Steps[int]:
        """See ``ServerChange``."""
        yield None
        count = await control.pause_here(self.mode)
        if self.clear_cache and control.is_paused:
            await control.door.call(ResetCaches(reset_running=False, reset_external=False))
        yield count


@dataclass(frozen=True, slots=True)
class ResumeServer(ServerChange[None]):
    """Let steps begin again after a pause."""

    async def steps(self, control: ChangedServer) -> Steps[None]:
        """See ``ServerChange``."""
        control.check_awake()
        yield None
        await control.resume_here()
        yield None


@dataclass(frozen=True, slots=True)
class EmptyCaches(ServerChange[None]):
    """Forget cached results and KV; see ``ResetCaches``."""

    reset_running: bool
    reset_external: bool

    async def steps(self, control: ChangedServer) -> Steps[None]:
        """See ``ServerChange``."""
        yield None
        await control.door.call(ResetCaches(self.reset_running, self.reset_external))
        yield None


@dataclass(frozen=True, slots=True)
class SleepServer(ServerChange[None]):
    """Pause, and free memory; see ``EngineControl.sleep``."""

    level: int
    mode: PauseMode

    async def steps(self, control: ChangedServer) -> Steps[None]:
        """See ``ServerChange``."""
        yield None
        await control.sleep_here(self.level, self.mode)
        yield None


@dataclass(frozen=True, slots=True)
class WakeServer(ServerChange[Sequence[str]]):
    """Allocate memory again; see ``EngineControl.wake_up``."""

    tags: Sequence[str]

    async def steps(self, control: ChangedServer) -> Steps[Sequence[str]]:
        """See ``ServerChange``."""
        yield None
        yield await control.wake_here(self.tags)


@dataclass(frozen=True, slots=True)
class LoadModel(ServerChange[ModelStatus]):
    """Serve one more model. It may be named before the commit, once it is loaded."""

    load: ModelLoad

    async def steps(self, control: ChangedServer) -> Steps[ModelStatus]:
        """See ``ServerChange``."""
        models = control.models
        is_new = not models.is_listed(self.load.model)
        status = await models.load(self.load)
        try:
            yield None
        except BaseException:
            if is_new:
                await models.unload(status.names[0])
            raise
        yield status


@dataclass(frozen=True, slots=True)
class UnloadModel(ServerChange[ModelStatus]):
    """Serve a model no more, and free its memory."""

    name: str

    async def steps(self, control: ChangedServer) -> Steps[ModelStatus]:
        """See ``ServerChange``."""
        control.models.check_unload(self.name)
        yield None
        yield await control.models.unload(self.name)
