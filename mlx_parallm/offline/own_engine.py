"""The engine of ``LLM`` on the caller's thread, which therefore has MLX."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.engine_commands import live_weights
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.offline.serving import serve
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.build import LoadedGenerator, LoadedPooling, build_model
from mlx_parallm.serving.interface import PoolingCalls
from mlx_parallm.training.service import Train
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.weights import SLEEP_TAGS
from mlx_parallm.worker.ops import ForgetTraining

T = TypeVar("T")


class OwnEngine:
    """Implements ``OfflineEngines``; it works only on the thread that made it."""

    def __init__(self, config: EngineConfig) -> None:
        self._loaded: LoadedGenerator | LoadedPooling | None = build_model(config, MetricFamilies())

    @property
    def model(self) -> GenerationModel | PoolingModel:
        """See ``OfflineEngines``."""
        return self._open.model

    @property
    def _open(self) -> LoadedGenerator | LoadedPooling:
        assert self._loaded is not None, "it is not closed"
        return self._loaded

    @property
    def _engine(self) -> GenerationEngine:
        if not isinstance(self._loaded, LoadedGenerator):
            raise InvalidRequestError(
                f"{self.model.names[0]} is an encoder and cannot generate.", param="model"
            )
        return self._loaded.engine

    def events(self, requests: Sequence[GenerateRequest]) -> Generator[GenerateEvent]:
        """See ``OfflineEngines``."""
        engine = self._engine
        added: list[str] = []
        try:
            for request in requests:
                engine.submit(request)
                added.append(request.request_id)
            while engine.has_work():
                yield from engine.step() or ()
        finally:
            # Requests remain only after an error; they must not meet those of the next call.
            for request_id in added:
                engine.abort(request_id)

    def serve(self, work: Callable[[PoolingCalls], Coroutine[Any, Any, T]]) -> T:
        """See ``OfflineEngines``."""
        assert isinstance(self._loaded, LoadedPooling), "it is a pooling model"
        return serve(self._loaded, work)

    def train(self, work: Callable[[Train], Coroutine[Any, Any, T]]) -> T:
        """See ``OfflineEngines``."""
        return serve(self._open, lambda client: work(client.train))

    def adapters(self) -> Sequence[AdapterInfo]:
        """See ``OfflineEngines``."""
        return self._open.engine.policies.infos()

    def load_adapter(self, upload: AdapterUpload) -> AdapterInfo:
        """See ``OfflineEngines``."""
        return self._open.engine.policies.load(upload)

    def unload_adapter(self, name: str) -> None:
        """See ``OfflineEngines``."""
        self._open.engine.policies.unload(name)

    def sleep(self, level: int) -> None:
        """See ``OfflineEngines``."""
        # The worker also keeps what training sessions have computed.
        self._open.worker.execute(ForgetTraining(model=self.model.names[0]))
        live_weights(self._open.engine).sleep(level)

    def wake_up(self, tags: Sequence[str]) -> Sequence[str]:
        """See ``OfflineEngines``."""
        live = live_weights(self._open.engine)
        live.wake(tags)
        return [tag for tag in SLEEP_TAGS if tag in live.asleep]

    def close(self) -> None:
        """See ``OfflineEngines``."""
        self._loaded = None
