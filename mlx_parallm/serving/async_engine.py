"""The engine as a server's event loop sees it: the core, and a client for each kind of model."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.interface import TellProgress
from mlx_parallm.engine.life import EngineLife, LocalLife
from mlx_parallm.generation.client import GenerationClient
from mlx_parallm.generation.model import GenerationModel, RequestHandle
from mlx_parallm.pooling.client import AsyncPooling
from mlx_parallm.serving.kinds import KINDS, build_engines
from mlx_parallm.types.request import GenerateRequest


def ignore_progress(_text: str, _fraction: float) -> None:
    """Report nothing."""


class AsyncEngine(EngineCore):
    """Serves every model of a configuration to one event loop. Implements ``EngineClient``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: TellProgress = ignore_progress,
        life: EngineLife | None = None,
    ) -> None:
        """``life``: where the engines live; a thread of this process if it is not given."""
        super().__init__(config, KINDS, life or LocalLife(config, on_progress, build_engines))
        self._generation = GenerationClient(self)
        self.pooling = AsyncPooling(self)

    def models(self) -> Sequence[GenerationModel]:
        """See ``GenerationClient``."""
        return self._generation.models()

    def first_model(self) -> GenerationModel:
        """See ``GenerationClient``."""
        return self._generation.first_model()

    def get_model(self, name: str) -> GenerationModel:
        """See ``GenerationClient``."""
        return self._generation.get_model(name)

    async def check_room(self, model: str, client: str, n: int) -> None:
        """See ``EngineClient``."""
        self.check_health()
        await self._generation.check_room(model, client, n)

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        """See ``EngineClient``."""
        return await self._generation.submit(request)

    def open_requests(self) -> Sequence[GenerateRequest]:
        """See ``EngineClient``."""
        return self._generation.open_requests()
