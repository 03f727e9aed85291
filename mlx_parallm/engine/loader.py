"""Loads models on the engine thread, and unloads them, while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from traceback import clear_frames
from typing import Protocol

from typing_extensions import override

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.commands import (
    Change,
    EngineCommand,
    EngineDoor,
    JoinsResults,
    LeavesNothing,
    LoopState,
    StateJournal,
)
from mlx_parallm.engine.kind import Kind, MemoryWish, OpenModel, TakesMemory
from mlx_parallm.engine.ledger import KV, WEIGHTS
from mlx_parallm.engine.model_files import kind_of, model_folder
from mlx_parallm.engine.models import KindTraits, LoadedModel, ServedEngine, ServedModel
from mlx_parallm.engine.thread_streams import free_streams
from mlx_parallm.models.checkpoints.weight_files import weight_files
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.request import SLEEP_TAGS

# SAVE_S: most seconds that saving takes before a model is unloaded.
SAVE_S = 5.0
# CHUNK_BYTES: bytes of a file that are read ahead at once.
CHUNK_BYTES = 1 << 24


class Promise(Protocol):
    """Promises memory to the model that is being loaded, and evicts others for it."""

    async def __call__(self, what: str, wish: MemoryWish, traits: KindTraits, /) -> int:
        """Return the bytes for a part of it, ``ledger.WEIGHTS`` or another; see ``RoomMaker``."""
        ...


class ModelLoader:
    """Loads models into memory and frees them: files are read on other threads.

    Streams wait only for the engine thread, which makes the arrays.
    """

    def __init__(self, door: EngineDoor, config: EngineConfig, kinds: Sequence[Kind]) -> None:
        self._door = door
        self._config = config
        self._kinds = kinds
        self._numbers = count()

    async def load(
        self,
        config: ModelConfig,
        names: tuple[str, ...],
        promise: Promise,
        on_progress: Callable[[float], None],
    ) -> ServedModel:
        """Load a model; ``promise`` is asked for its memory before that is taken.

        Raises:
            ModelLoadError, InvalidRequestError: it cannot be loaded.
        """
        door, number = self._door, next(self._numbers)
        named = replace(config, served_names=names)
        kind, open_model = await asyncio.to_thread(
            _read, named, self._config, self._kinds, lambda share: on_progress(share / 2)
        )
        try:
            weights = MemoryWish.exactly(await door.call(BeginLoad(number, open_model)))
            await promise(WEIGHTS, weights, kind.traits)
            # Models are loaded in parts, between the steps of others.
            while (progress := await door.call(AdvanceLoad(number))).share < 1:
                on_progress((1 + progress.share) / 2)
                if progress.wish is not None:
                    granted = await promise(KV, progress.wish, kind.traits)
                    await door.call(GrantMemory(number, granted))
            return (await door.call(CommitLoad(number))).unpack(door.ask)
        except BaseException as problem:
            # The frames that failed hold arrays. The others are freed on the thread that made them,
            # before another model may take their bytes.
            clear_frames(problem.__traceback__)
            with contextlib.suppress(ParallmError):
                await asyncio.shield(asyncio.ensure_future(door.call(DropLoad(number))))
            raise

    async def drop(self, name: str) -> None:
        """Free the memory of an idle model, by its first name; its adapters stay for its return."""
        deadline_s = time.monotonic() + SAVE_S
        while time.monotonic() < deadline_s and await self._door.call(SavePart(name)):
            pass
        await self._door.call(UnloadModel(name))

    async def resize(self, name: str, num_bytes: int) -> ServedModel | None:
        """Give an idle model so many bytes besides its weights; None if they cannot change."""
        loaded = await self._door.call(ResizeMemory(name, num_bytes))
        return None if loaded is None else loaded.unpack(self._door.ask)

    async def forget(self, name: str) -> None:
        """Forget what is kept of a model that was dropped and does not come back."""
        await self._door.call(ForgetModel(name))


def _read(
    config: ModelConfig,
    settings: EngineConfig,
    kinds: Sequence[Kind],
    on_progress: Callable[[float], None],
) -> tuple[Kind, OpenModel]:
    """Return a model's kind and a function that opens it; fetch its files first if need be.

    The files are read once into the system's cache, so that the engine thread does not wait for
    a disk.

    Raises:
        ModelLoadError: it cannot be fetched or read.
    """
    folder = model_folder(config, lambda _, share: on_progress(share / 2))
    kind = kind_of(kinds, config, folder)
    try:
        open_model = kind.read(config, folder, settings)
    finally:
        # This thread does not outlive the server.
        free_streams()
    files = weight_files(folder)
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                done += len(chunk)
                on_progress((1 + done / total) / 2)
    return kind, open_model


@dataclass(frozen=True, slots=True)
class BeginLoad(EngineCommand[int]):
    """Open a model's weights; return how many bytes they will take.

    Attributes:
        number: unique among the models that are being loaded.
        open_model: opens it.
    """

    number: int
    open_model: OpenModel

    def __call__(self, loop: LoopState) -> int:
        """Apply the command."""
        pending = loop.pending[self.number] = self.open_model(loop.families, loop.worker)
        return pending.num_bytes

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.pending["load", self.number] = self


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a load: its share from 0 to 1, and memory that it waits for."""

    share: float
    wish: MemoryWish | None = None


@dataclass(frozen=True, slots=True)
class AdvanceLoad(LeavesNothing, EngineCommand[LoadProgress], JoinsResults):
    """Load the next part of a model; see ``PendingModel.advance`` and ``TakesMemory``."""

    number: int

    def __call__(self, loop: LoopState) -> LoadProgress:
        """Apply the command."""
        pending = loop.pending[self.number]
        share = pending.advance()
        return LoadProgress(share, pending.wish if isinstance(pending, TakesMemory) else None)

    @override
    def together(self, results: Sequence[LoadProgress]) -> LoadProgress:
        """Return the least share: all engines must have the model. Its wish suffices for each."""
        share = min(result.share for result in results)
        wishes = [result.wish for result in results if result.wish is not None]
        is_complete = len(wishes) == len(results)
        return LoadProgress(share, reduce(MemoryWish.joined, wishes) if is_complete else None)


@dataclass(frozen=True, slots=True)
class GrantMemory(EngineCommand[None]):
    """Let a model take memory besides its weights; see ``TakesMemory``."""

    number: int
    num_bytes: int

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        pending = loop.pending[self.number]
        assert isinstance(pending, TakesMemory), "it has asked for memory"
        pending.grant(self.num_bytes)

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.pending["grant", self.number] = self


@dataclass(frozen=True, slots=True)
class FinishLoad(LeavesNothing, EngineCommand[None]):
    """Load the rest of a model at once, for an engine that serves no request yet."""

    number: int

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        while AdvanceLoad(self.number)(loop).share < 1:
            pass


@dataclass(frozen=True, slots=True)
class DropLoad(EngineCommand[None]):
    """Free a model that will not be finished, if it is there."""

    number: int

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        pending = loop.pending.pop(self.number, None)
        if pending is not None:
            pending.close()

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.pending.pop(("load", self.number), None)
        journal.pending.pop(("grant", self.number), None)


@dataclass(frozen=True, slots=True)
class CommitLoad(Change, EngineCommand[LoadedModel]):
    """Finish a load: requests may run on the model from now on."""

    number: int

    def __call__(self, loop: LoopState) -> LoadedModel:
        """Apply the command."""
        # If this fails, ``DropLoad`` frees what there is.
        pending = loop.pending[self.number]
        name = pending.name
        built = pending.finish(loop.policies.get(name))
        del loop.pending[self.number]
        pending.close()
        assert built.engine is not None
        if (missed := loop.missed.pop(name, None)) is not None:
            missed.restore(built.engine)
        _join(name, built.engine, loop)
        return LoadedModel(name, built.model)

    @override
    def noted(self, journal: StateJournal, result: LoadedModel) -> None:
        begin = journal.pending.pop(("load", self.number))
        grant = journal.pending.pop(("grant", self.number), None)
        granted = () if grant is None else (grant,)
        journal.models[result.name] = (begin, *granted, FinishLoad(self.number), self)


@dataclass(frozen=True, slots=True)
class ResizeMemory(Change, EngineCommand[LoadedModel | None]):
    """Give an idle model so many bytes besides its weights; None if it is not there, or cannot.

    What it had computed before is forgotten, except what is kept outside of the device's memory.
    """

    name: str
    num_bytes: int

    def __call__(self, loop: LoopState) -> LoadedModel | None:
        """Apply the command."""
        engine = loop.engines.get(self.name)
        if engine is None or (engine.live is not None and engine.live.asleep):
            return None
        loop.deliver(engine.settle())
        built = engine.resized(self.num_bytes)
        if built is None:
            return None
        assert built.engine is not None
        _join(self.name, built.engine, loop)
        return LoadedModel(self.name, built.model)

    @override
    def noted(self, journal: StateJournal, result: LoadedModel | None) -> None:
        journal.resized[self.name] = self


@dataclass(frozen=True, slots=True)
class ForgetModel(Change, EngineCommand[None]):
    """Drop the version and the adapters of a model that was unloaded."""

    name: str

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        loop.policies.pop(self.name, None)
        loop.missed.pop(self.name, None)

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        if self.name in journal.unloaded:
            journal.unloaded[self.name] = (UnloadModel(self.name), self)
        journal.weights.pop(self.name, None)
        for key in [key for key in journal.adapters if key[0] == self.name]:
            del journal.adapters[key]


@dataclass(frozen=True, slots=True)
class SavePart(LeavesNothing, EngineCommand[bool], JoinsResults):
    """Save a part of what an idle model has computed; return True if there is more."""

    name: str

    def __call__(self, loop: LoopState) -> bool:
        """Apply the command."""
        engine = loop.engines.get(self.name)
        if engine is None:
            return False
        loop.deliver(engine.settle())
        return engine.save_part()

    @override
    def together(self, results: Sequence[bool]) -> bool:
        return any(results)


@dataclass(frozen=True, slots=True)
class UnloadModel(Change, EngineCommand[None]):
    """Free the memory of an idle model, if it is there."""

    name: str

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        engine = loop.engines.pop(self.name, None)
        if engine is not None:
            loop.deliver(engine.settle())
            engine.release()

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.resized.pop(self.name, None)
        if journal.models.pop(self.name, None) is None:
            journal.unloaded.setdefault(self.name, (self,))
        if self.name in journal.weights:
            journal.weights[self.name] = journal.weights[self.name].evicted()


def _join(name: str, engine: ServedEngine, loop: LoopState) -> None:
    """Let a new engine take turns; it is paused, and sleeps, as all are by now."""
    engine.is_paused = loop.is_paused
    if engine.live is not None:
        engine.live.begin_hashing()
        if loop.asleep:
            engine.live.sleep(loop.sleep_level)
            engine.live.wake([tag for tag in SLEEP_TAGS if tag not in loop.asleep])
    loop.add(name, engine)
