"""Brings encoders onto the engine thread and away from it while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine import host_actions
from mlx_parallm.engine.commands import EngineHost
from mlx_parallm.engine.encoder_build import build_encoder, is_read, tokenizer_of
from mlx_parallm.engine.encoder_metrics import EncoderFamilies
from mlx_parallm.engine.encoder_residency import MakeRoom
from mlx_parallm.engine.interface import EncoderModel, TextEncoder
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.runner.hub import log_download, resolve_model

# Of the files that are read ahead.
CHUNK_BYTES = 1 << 24


class EngineThread(Protocol):
    """What this needs of the engine."""

    async def call(self, action: Callable[[EngineHost], Any]) -> Any:
        """What an action between two steps gives; raise its error."""
        ...


class ThreadLoader:
    """Implements ``EncoderLoader``: files are read on other threads, arrays made on the engine's.

    Streams wait for the latter only.
    """

    def __init__(
        self, thread: EngineThread, config: EngineConfig, families: EncoderFamilies
    ) -> None:
        self._thread = thread
        self._config = config
        self._families = families

    async def load(
        self,
        config: ModelConfig,
        names: tuple[str, ...],
        make_room: MakeRoom,
        on_progress: Callable[[float], None],
    ) -> EncoderModel:
        """See ``EncoderLoader.load``."""
        folder, tokenizer = await asyncio.to_thread(_read, config)
        on_progress(0.5)
        await make_room(_file_bytes(folder))

        def build(host: EngineHost) -> EncoderModel:
            built = build_encoder(
                config, folder, names, self._config, self._families, tokenizer=tokenizer
            )
            host_actions.add_encoder(host, built)
            return built.model

        return await self._thread.call(build)

    async def drop(self, name: str) -> None:
        """See ``EncoderLoader.drop``."""
        await self._thread.call(lambda host: host_actions.drop_encoder(host, name))


def _read(config: ModelConfig) -> tuple[Path, TextEncoder]:
    """The folder, fetched first where need be, its tokenizer; weights come into the file cache."""
    assert config.path is not None
    folder = resolve_model(
        config.path, config.revision, log_download, trust_remote_code=config.trust_remote_code
    )
    if not is_read(config, folder):
        raise InvalidRequestError(
            f"{config.path} is no encoder. Models that generate are loaded when the server starts: "
            "their KV memory is planned there.",
            param="model",
        )
    tokenizer = tokenizer_of(config, folder)
    for file in folder.glob("model*.safetensors"):
        with file.open("rb") as content:
            while content.read(CHUNK_BYTES):
                pass
    return folder, tokenizer


def _file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
