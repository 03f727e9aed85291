"""The engine as a server's event loop sees it: the core, with the kinds that are served."""

from __future__ import annotations

import asyncio
from typing import Any

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.kind import TellProgress
from mlx_parallm.engine.life import EngineLife
from mlx_parallm.process_setup.device_process import prepare_device_process
from mlx_parallm.serving.kinds import KINDS, ignore_progress
from mlx_parallm.training.requests import TrainingRequest


class AsyncEngine(EngineCore):
    """Serves every model of a configuration to one event loop. Implements ``EngineClient``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: TellProgress = ignore_progress,
        life: EngineLife | None = None,
        owns_process: bool = False,
    ) -> None:
        """Prepare; see ``EngineCore``. Without a ``life``, a thread of this process is one."""
        life = life or _life_here(config, on_progress)
        super().__init__(config, KINDS, life, owns_process=owns_process)

    async def train(self, request: TrainingRequest) -> tuple[Any, ...]:
        """See ``EngineClient``."""
        reader = AnswerReader[tuple[Any, ...]](request)
        await self.open_reader(request, reader, is_beside=True)
        try:
            return await reader.results()
        except asyncio.CancelledError:
            await self.abort(request.request_id)
            raise


def _life_here(config: EngineConfig, on_progress: TellProgress) -> EngineLife:
    prepare_device_process()
    # The builders bring MLX: a process whose engines live elsewhere must not import them.
    from mlx_parallm.serving.build import local_life  # noqa: PLC0415

    return local_life(config, on_progress)
