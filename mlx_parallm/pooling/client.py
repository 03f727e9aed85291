"""``PoolingClient`` on the event loop's side: the pooling models, and requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from mlx_parallm.engine.adapter_names import AdapterNames
from mlx_parallm.engine.defaults import AnswerReader
from mlx_parallm.engine.interface import ModelLoad, ModelStatus
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadingError, ModelNotFoundError
from mlx_parallm.types.pooling import EncodeRequest, EncodeResults, Task


class Core(Protocol):
    """What this needs of the engine; ``EngineCore`` has it."""

    @property
    def control(self) -> AdapterNames:
        """What knows of adapters."""
        ...

    def statuses(self) -> Sequence[ModelStatus]:
        """Return all models that requests may name, and those that are being loaded."""
        ...

    def find(self, name: str) -> ModelStatus | None:
        """Return the model, or the adapter of one, of this name."""
        ...

    def not_found(self, name: str) -> ModelNotFoundError:
        """Return the error for a name that nothing has."""
        ...

    async def wait(self, name: str) -> None:
        """Return once a model or adapter is loaded."""
        ...

    async def load_model(self, asked: ModelLoad) -> ModelStatus:
        """Serve one more model."""
        ...

    async def unload_model(self, name: str) -> ModelStatus:
        """Serve a model no longer."""
        ...

    async def open_reader(self, request: Any) -> Any:
        """Admit a request; return the reader of its events."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request."""
        ...


class AsyncPooling:
    """Implements ``PoolingClient``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._numbers = count()

    def models(self) -> Sequence[PoolingModel]:
        """See ``PoolingClient.models``."""
        found = (one.model for one in self._core.statuses())
        return [one for one in found if isinstance(one, PoolingModel)]

    def statuses(self) -> Sequence[ModelStatus]:
        """See ``PoolingClient.statuses``."""
        return [one for one in self._core.statuses() if _may_pool(one)]

    def find(self, name: str) -> ModelStatus | None:
        """See ``PoolingClient.find``."""
        found = self._core.find(name)
        return found if found is not None and _may_pool(found) else None

    def get(self, name: str | None, *tasks: Task) -> PoolingModel:
        """See ``PoolingClient.get``."""
        wanted = set(tasks)
        if name is None:
            able = [one for one in self.models() if wanted.intersection(one.info.tasks)]
            if not able:
                raise InvalidRequestError(
                    f"No model that can {' or '.join(tasks)} is served here.", param="model"
                )
            return able[0]
        status = self._core.find(name)
        if status is None:
            raise self._core.not_found(name)
        if not _may_pool(status):
            raise InvalidRequestError(f"{name} generates; it is no encoder.", param="model")
        found: PoolingModel | None = status.model
        if found is None:
            raise ModelLoadingError(name)
        if not wanted.intersection(found.info.tasks):
            raise InvalidRequestError(
                f"{name} cannot {' or '.join(tasks)}; it can {', '.join(found.info.tasks)}.",
                param="model",
            )
        return found

    async def wait(self, name: str) -> None:
        """See ``PoolingClient.wait``."""
        await self._core.wait(name)

    async def load(self, asked: ModelLoad) -> ModelStatus:
        """See ``PoolingClient.load``."""
        return await self._core.load_model(asked)

    async def unload(self, name: str) -> ModelStatus:
        """See ``PoolingClient.unload``."""
        return await self._core.unload_model(name)

    async def encode(self, request: EncodeRequest) -> EncodeResults:
        """See ``PoolingClient.encode``."""
        # Clients may give one id to several requests.
        own = replace(request, request_id=f"{request.request_id}-{next(self._numbers)}")
        try:
            reader: AnswerReader[EncodeResults] = await self._core.open_reader(own)
        except ModelLoadingError:
            # Whoever tries anew is to find what is there now.
            await self._core.control.refresh()
            raise ModelLoadingError(request.model) from None
        try:
            return await reader.results()
        except asyncio.CancelledError:
            await self._core.abort(own.request_id)
            raise


def _may_pool(status: ModelStatus) -> bool:
    """True unless a model is known to be of another kind."""
    return status.model is None or isinstance(status.model, PoolingModel)
