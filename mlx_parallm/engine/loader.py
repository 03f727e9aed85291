"""Loads models on the engine thread, and unloads them, while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

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
from mlx_parallm.engine.kind import Kind, OpenModel
from mlx_parallm.engine.model_files import kind_of, model_folder
from mlx_parallm.engine.models import KindTraits, ServedModel
from mlx_parallm.engine.sources import MODEL
from mlx_parallm.engine.thread_streams import free_streams
from mlx_parallm.models.checkpoints.weight_files import weight_files
from mlx_parallm.types.errors import InvalidRequestError

# CHUNK_BYTES: bytes of a file that are read ahead at once.
CHUNK_BYTES = 1 << 24

#: Evicts until a model of some kind has the bytes that it needs.
MakeRoom = Callable[[int, KindTraits], Awaitable[None]]


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
        make_room: MakeRoom,
        on_progress: Callable[[float], None],
    ) -> ServedModel:
        """Load a model; ``make_room`` is called with its bytes and kind before they are taken.

        Raises:
            ModelLoadError, InvalidRequestError: it cannot be loaded.
        """
        door, number = self._door, next(self._numbers)
        named = replace(config, served_names=names)
        kind, open_model = await asyncio.to_thread(
            _read, named, self._config, self._kinds, lambda share: on_progress(share / 2)
        )
        try:
            await make_room(await door.call(BeginLoad(number, open_model)), kind.traits)
            # Models are loaded in parts, between the steps of others.
            while (share := await door.call(AdvanceLoad(number))) < 1:
                on_progress((1 + share) / 2)
            return await door.call(CommitLoad(number))
        except BaseException:
            # Its arrays are freed on the thread that made them.
            door.send(DropLoad(number))
            raise

    async def drop(self, name: str) -> None:
        """Free the memory of an idle model, by its first name; its adapters stay for its return."""
        await self._door.call(UnloadModel(name))

    async def forget(self, name: str) -> None:
        """Forget the adapters of a model that was dropped and does not come back."""
        await self._door.call(ForgetAdapters(name))


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
        InvalidRequestError: its kind is not loaded while the server runs.
    """
    assert config.path is not None
    folder = model_folder(config, lambda _, share: on_progress(share / 2))
    kind = kind_of(kinds, config, folder)
    if not kind.traits.loads_later:
        raise InvalidRequestError(f"{config.path} {kind.traits.refuses_load}", param=MODEL)
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
class AdvanceLoad(LeavesNothing, EngineCommand[float], JoinsResults):
    """Load the next part of a model; see ``PendingModel.advance``."""

    number: int

    def __call__(self, loop: LoopState) -> float:
        """Apply the command."""
        return loop.pending[self.number].advance()

    @override
    def together(self, results: Sequence[float]) -> float:
        """Return the least share: all engines must have the model."""
        return min(results)


@dataclass(frozen=True, slots=True)
class FinishLoad(LeavesNothing, EngineCommand[None]):
    """Load the rest of a model at once, for an engine that serves no request yet."""

    number: int

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        while AdvanceLoad(self.number)(loop) < 1:
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


@dataclass(frozen=True, slots=True)
class CommitLoad(Change, EngineCommand[ServedModel]):
    """Finish a load: requests may run on the model from now on."""

    number: int

    def __call__(self, loop: LoopState) -> ServedModel:
        """Apply the command."""
        pending = loop.pending.pop(self.number)
        name = pending.name
        built = pending.finish(loop.policies.get(name))
        pending.close()
        assert built.engine is not None
        # The server may be paused now; then the new engine is too.
        built.engine.is_paused = any(engine.is_paused for engine in loop.engines.values())
        if built.engine.live is not None:
            built.engine.live.begin_hashing()
        loop.engines[name] = built.engine
        loop.policies[name] = built.engine.policies
        return built.model

    @override
    def noted(self, journal: StateJournal, result: ServedModel) -> None:
        begin = journal.pending.pop(("load", self.number))
        journal.models[result.names[0]] = (begin, FinishLoad(self.number), self)


@dataclass(frozen=True, slots=True)
class ForgetAdapters(Change, EngineCommand[None]):
    """Drop the adapters of a model."""

    name: str

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        loop.policies.pop(self.name, None)

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        for key in [key for key in journal.adapters if key[0] == self.name]:
            del journal.adapters[key]


@dataclass(frozen=True, slots=True)
class UnloadModel(Change, EngineCommand[None]):
    """Free the memory of an idle model, if it is there."""

    name: str

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        engine = loop.engines.pop(self.name, None)
        if engine is not None:
            engine.release()

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.models.pop(self.name, None)
