"""The engine as some of its callers see it: a view changes what its subclass says, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.interface import EngineLoad, ModelLoad, ModelMemory, ModelStatus
from mlx_parallm.generation.model import GenerationModel, RequestHandle
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient, PoolingClient
from mlx_parallm.types.pooling import EncodeRequest, EncodeResults, Task
from mlx_parallm.types.request import GenerateRequest


class EngineView:
    """Implements ``EngineClient`` by another one."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def check_room(self, model: str, client: str, n: int) -> None:
        """See ``EngineClient``."""
        await self._engine.check_room(model, client, n)

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        """See ``EngineClient``."""
        return await self._engine.submit(request)

    @property
    def config(self) -> EngineConfig:
        """See ``EngineClient``."""
        return self._engine.config

    def models(self) -> Sequence[GenerationModel]:
        """See ``EngineClient``."""
        return self._engine.models()

    def first_model(self) -> GenerationModel:
        """See ``EngineClient``."""
        return self._engine.first_model()

    def get_model(self, name: str) -> GenerationModel:
        """See ``EngineClient``."""
        return self._engine.get_model(name)

    @property
    def encoders(self) -> PoolingClient:
        """See ``EngineClient``."""
        return self._engine.encoders

    async def abort(self, request_id: str) -> None:
        """See ``EngineClient``."""
        await self._engine.abort(request_id)

    def open_requests(self) -> Sequence[GenerateRequest]:
        """See ``EngineClient``."""
        return self._engine.open_requests()

    async def cancel(self, request_id: str) -> None:
        """See ``EngineClient``."""
        await self._engine.cancel(request_id)

    async def memory(self) -> Mapping[str, ModelMemory]:
        """See ``EngineClient``."""
        return await self._engine.memory()

    async def load(self) -> EngineLoad:
        """See ``EngineClient``."""
        return await self._engine.load()

    @property
    def control(self) -> EngineControl:
        """See ``EngineClient``."""
        return self._engine.control

    def check_health(self) -> None:
        """See ``EngineClient``."""
        self._engine.check_health()

    def check_open(self) -> None:
        """See ``EngineClient``."""
        self._engine.check_open()

    async def render_metrics(self) -> tuple[bytes, str]:
        """See ``EngineClient``."""
        return await self._engine.render_metrics()


class EncoderView:
    """Implements ``PoolingClient`` by another one."""

    def __init__(self, encoders: PoolingClient) -> None:
        self._encoders = encoders

    def models(self) -> Sequence[PoolingModel]:
        """See ``PoolingClient``."""
        return self._encoders.models()

    def statuses(self) -> Sequence[ModelStatus]:
        """See ``PoolingClient``."""
        return self._encoders.statuses()

    def find(self, name: str) -> ModelStatus | None:
        """See ``PoolingClient``."""
        return self._encoders.find(name)

    async def wait(self, name: str) -> None:
        """See ``PoolingClient``."""
        await self._encoders.wait(name)

    async def load(self, asked: ModelLoad) -> ModelStatus:
        """See ``PoolingClient``."""
        return await self._encoders.load(asked)

    async def unload(self, name: str) -> ModelStatus:
        """See ``PoolingClient``."""
        return await self._encoders.unload(name)

    def get(self, name: str | None, *tasks: Task) -> PoolingModel:
        """See ``PoolingClient``."""
        return self._encoders.get(name, *tasks)

    async def encode(self, request: EncodeRequest) -> EncodeResults:
        """See ``PoolingClient``."""
        return await self._encoders.encode(request)
