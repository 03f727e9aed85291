"""Brings models onto the engine thread and away from it while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.demo_models.folders import demo_folder
from mlx_parallm.engine.build import fetch_model, kind_of
from mlx_parallm.engine.commands import Call, Command, EngineHost
from mlx_parallm.engine.interface import Kind, OpenModel, ServedModel
from mlx_parallm.engine.residency import MakeRoom

# Of the files that are read ahead.
CHUNK_BYTES = 1 << 24


class EngineThread(Protocol):
    """What this needs of the engine."""

    async def call(self, action: Callable[[EngineHost], Any]) -> Any:
        """What an action between two steps gives; raise its error."""
        ...

    def tell(self, command: Command) -> None:
        """Send a command that nobody waits for."""
        ...


class ThreadLoader:
    """Implements ``ModelLoader``: files are read on other threads, arrays made on the engine's.

    Streams wait for the latter only.
    """

    def __init__(self, thread: EngineThread, config: EngineConfig, kinds: Sequence[Kind]) -> None:
        self._thread = thread
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
        """See ``ModelLoader.load``."""
        thread, number = self._thread, next(self._numbers)
        read = Progress(on_progress, 0.0, 1 / 2)
        named = replace(config, served_names=names)
        open_model = await asyncio.to_thread(_read, named, self._config, self._kinds, read)
        try:
            begin = partial(_begin, number=number, open_model=open_model)
            await make_room(await thread.call(begin))
            evaluated = Progress(on_progress, 1 / 2, 1)
            # In parts, each between two steps of what is served.
            while (share := await thread.call(partial(_advance, number=number))) < 1:
                evaluated(share)
            return await thread.call(partial(_finish, number=number))
        except BaseException:
            # Whatever it has is let go of on the thread that made it.
            thread.tell(Call(action=partial(_close, number=number), reply=lambda _: None))
            raise

    async def drop(self, name: str) -> None:
        """See ``ModelLoader.drop``."""
        await self._thread.call(partial(_drop, name=name))

    async def forget(self, name: str) -> None:
        """See ``ModelLoader.forget``."""
        await self._thread.call(partial(_forget, name=name))


class Progress:
    """Tells a part of the whole's progress."""

    def __init__(self, tell: Callable[[float], None], begin: float, end: float) -> None:
        self._tell = tell
        self._begin = begin
        self._width = end - begin

    def __call__(self, share: float) -> None:
        """Tell the share of the part that is done; any thread may."""
        self._tell(self._begin + self._width * share)


def _read(
    config: ModelConfig, settings: EngineConfig, kinds: Sequence[Kind], on_progress: Progress
) -> OpenModel:
    """Return what opens a model, whose files are fetched first where need be.

    The weights come into the system's cache of files, so that the engine thread does not wait for
    a disk.

    Raises:
        ModelLoadError: it cannot be fetched or read.
        InvalidRequestError: its kind is not loaded while the server runs.
    """
    assert config.path is not None
    folder = demo_folder(config.path) or fetch_model(
        config, config.path, lambda _, share: on_progress(share / 2)
    )
    open_model = kind_of(kinds, config, folder).read(config, folder, settings)
    files = list(folder.glob("model*.safetensors"))
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                done += len(chunk)
                on_progress((1 + done / total) / 2)
    return open_model


def _begin(host: EngineHost, *, number: int, open_model: OpenModel) -> int:
    """Open a model's weights; return how many bytes they will take."""
    pending = host.pending[number] = open_model(host.families)
    return pending.num_bytes


def _advance(host: EngineHost, *, number: int) -> float:
    """Load the next part; see ``PendingModel.advance``."""
    return host.pending[number].advance()


def _close(host: EngineHost, *, number: int) -> None:
    """Free a model that will not be finished, if it is there."""
    pending = host.pending.pop(number, None)
    if pending is not None:
        pending.close()


def _finish(host: EngineHost, *, number: int) -> ServedModel:
    """Let requests run on a model, which is in memory."""
    pending = host.pending.pop(number)
    name = pending.name
    built = pending.finish(host.adapters.get(name))
    pending.close()
    assert built.engine is not None
    # It joins what is paused now.
    built.engine.is_paused = any(one.is_paused for one in host.engines.values())
    host.engines[name] = built.engine
    host.adapters[name] = built.engine.adapters
    return built.model


def _forget(host: EngineHost, *, name: str) -> None:
    """Drop the adapters of a model."""
    host.adapters.pop(name, None)


def _drop(host: EngineHost, *, name: str) -> None:
    """Free the memory of a model, if it is there, that no request runs on."""
    engine = host.engines.pop(name, None)
    if engine is not None:
        engine.release()
