"""Brings encoders onto the engine thread and away from it while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.demo_models.folders import demo_folder
from mlx_parallm.engine.commands import Call, Command, EngineHost
from mlx_parallm.engine.encoder_interface import EncoderModel, TextEncoder
from mlx_parallm.engine.encoders.build import EncoderBuild, is_read, tokenizer_of
from mlx_parallm.engine.encoders.residency import MakeRoom
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.worker.weights.hub import resolve_model

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
    """Implements ``EncoderLoader``: files are read on other threads, arrays made on the engine's.

    Streams wait for the latter only.
    """

    def __init__(self, thread: EngineThread, config: EngineConfig) -> None:
        self._thread = thread
        self._config = config
        self._numbers = count()

    async def load(
        self,
        config: ModelConfig,
        names: tuple[str, ...],
        make_room: MakeRoom,
        on_progress: Callable[[float], None],
    ) -> EncoderModel:
        """See ``EncoderLoader.load``."""
        thread, number = self._thread, next(self._numbers)
        read = Progress(on_progress, 0.0, 1 / 2)
        folder, tokenizer = await asyncio.to_thread(_read, config, read)
        build = partial(EncoderBuild, config, folder, names, self._config, tokenizer=tokenizer)
        try:
            await make_room(await thread.call(partial(_begin, number=number, build=build)))
            evaluated = Progress(on_progress, 1 / 2, 1)
            # In parts, each between two steps of what is served.
            while (share := await thread.call(partial(_advance, number=number))) < 1:
                evaluated(share)
            model = await thread.call(partial(_finish, number=number))
        except BaseException:
            # Whatever it has is let go of on the thread that made it.
            thread.tell(Call(action=partial(_close, number=number), reply=lambda _: None))
            raise
        return replace(model, tokenizer=tokenizer)

    async def drop(self, name: str) -> None:
        """See ``EncoderLoader.drop``."""
        await self._thread.call(partial(_drop, name=name))

    async def forget(self, name: str) -> None:
        """See ``EncoderLoader.forget``."""
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


def _read(config: ModelConfig, on_progress: Progress) -> tuple[Path, TextEncoder]:
    """The folder, fetched first where need be, and its tokenizer.

    The weights come into the system's cache of files, so that the engine thread does not wait for
    a disk.

    Raises:
        ModelLoadError: it cannot be fetched, or has no tokenizer.
        InvalidRequestError: it is no encoder.
    """
    assert config.path is not None
    folder = demo_folder(config.path) or resolve_model(
        config.path,
        config.revision,
        lambda _, share: on_progress(share / 2),
        trust_remote_code=config.trust_remote_code,
    )
    if not is_read(config, folder):
        raise InvalidRequestError(
            f"{config.path} is no encoder. Models that generate are loaded when the server starts: "
            "their KV memory is planned there.",
            param="model",
        )
    tokenizer = tokenizer_of(config, folder)
    files = list(folder.glob("model*.safetensors"))
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                done += len(chunk)
                on_progress((1 + done / total) / 2)
    return folder, tokenizer


def _begin(host: EngineHost, *, number: int, build: Callable[..., EncoderBuild]) -> int:
    """Open an encoder's weights; how many bytes they will take.

    ``build`` lacks the metrics, which are the engine's.
    """
    begun = host.builds[number] = build(families=host.encoder_families)
    return begun.num_bytes


def _advance(host: EngineHost, *, number: int) -> float:
    """Have the next part in memory; see ``EncoderBuild.advance``."""
    return host.builds[number].advance()


def _close(host: EngineHost, *, number: int) -> None:
    """Let go of an encoder that will not be finished, if it is there."""
    build = host.builds.pop(number, None)
    if build is not None:
        build.close()


def _finish(host: EngineHost, *, number: int) -> EncoderModel:
    """Let requests run on an encoder, which is in memory."""
    build = host.builds.pop(number)
    name = build.name
    built = build.finish(host.encoder_adapters.get(name))
    build.close()
    assert built.engine is not None
    host.encoders[name] = built.engine
    host.encoder_adapters[name] = built.engine.adapters
    return built.model


def _forget(host: EngineHost, *, name: str) -> None:
    """Drop the adapters of an encoder."""
    host.encoder_adapters.pop(name, None)


def _drop(host: EngineHost, *, name: str) -> None:
    """Give back the memory of an encoder, if it is there, that no request runs on."""
    engine = host.encoders.pop(name, None)
    if engine is not None:
        engine.release()
