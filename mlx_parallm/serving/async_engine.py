"""The engine as a server's event loop sees it: the core, and a client for each kind of model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.kind import TellProgress
from mlx_parallm.engine.life import EngineLife
from mlx_parallm.generation.event_stream import EventStream
from mlx_parallm.generation.model import RequestHandle
from mlx_parallm.pooling.client import AsyncPooling
from mlx_parallm.process_setup.device_process import prepare_device_process
from mlx_parallm.serving.generators import Generators
from mlx_parallm.serving.kinds import KINDS, ignore_progress
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.types.request import GenerateRequest


class AsyncEngine(EngineCore, Generators):
    """Serves every model of a configuration to one event loop. Implements ``EngineClient``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: TellProgress = ignore_progress,
        life: EngineLife | None = None,
    ) -> None:
        """``life``: where the engines live; a thread of this process if it is not given."""
        super().__init__(config, KINDS, life or _life_here(config, on_progress))
        self.pooling = AsyncPooling(self)

    async def check_room(self, model: str, client: str, n: int) -> None:
        """See ``EngineClient``."""
        self.check_health()
        served = self.get_model(model)
        await self.check_queue(served.parent or served.names[0], client, n)

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        """See ``EngineClient``."""
        self.check_open()
        self.get_model(request.model)
        stream: EventStream = await self.open_reader(request)
        return RequestHandle(request_id=request.request_id, events=stream, gather=stream.gather)

    async def train(self, request: TrainingRequest) -> tuple[Any, ...]:
        """See ``EngineClient``."""
        reader = AnswerReader[tuple[Any, ...]](request)
        await self.open_reader(request, reader, is_beside=True)
        try:
            return await reader.results()
        except asyncio.CancelledError:
            await self.abort(request.request_id)
            raise

    def open_requests(self) -> Sequence[GenerateRequest]:
        """See ``EngineClient``."""
        return [each for each in self.all_requests() if isinstance(each, GenerateRequest)]


def _life_here(config: EngineConfig, on_progress: TellProgress) -> EngineLife:
    prepare_device_process()
    # The builders bring MLX: a process whose engines live elsewhere must not import them.
    from mlx_parallm.serving.build import local_life  # noqa: PLC0415

    return local_life(config, on_progress)
