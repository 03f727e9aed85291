"""``PoolingClient`` on the event loop: lists the pooling models and sends requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.status import ModelStatus, RequestDoor
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadingError
from mlx_parallm.types.pooling import PoolingResults, PoolRequest, Task


class AsyncPooling:
    """The pooling models of an engine. Implements ``PoolingClient``."""

    def __init__(self, core: RequestDoor) -> None:
        self._core = core
        self._numbers = count()

    def models(self) -> Sequence[PoolingModel]:
        """See ``PoolingClient.models``."""
        models = (status.model for status in self._core.statuses())
        return [model for model in models if isinstance(model, PoolingModel)]

    def find(self, name: str) -> ModelStatus | None:
        """See ``PoolingClient.find``."""
        status = self._core.find(name)
        return status if status is not None and _may_pool(status) else None

    def get(self, name: str | None, *tasks: Task) -> PoolingModel:
        """See ``PoolingClient.get``."""
        if name is None:
            able = [model for model in self.models() if set(tasks).intersection(model.info.tasks)]
            if not able:
                raise InvalidRequestError(
                    f"No model that can {' or '.join(tasks)} is served here.", param="model"
                )
            # A model's main task is its first: a reward model gives vectors too, after rewards.
            return min(
                able,
                key=lambda model: next(
                    place for place, task in enumerate(model.info.tasks) if task in tasks
                ),
            )
        status = self._core.find(name)
        if status is None:
            raise self._core.not_found(name)
        if not _may_pool(status):
            raise status.wrong_kind(name)
        model: PoolingModel | None = status.model
        if model is None:
            raise ModelLoadingError(name)
        return check_tasks(model, name, tasks)

    async def wait(self, name: str) -> None:
        """See ``PoolingClient.wait``."""
        await self._core.wait(name)

    async def encode(self, request: PoolRequest) -> PoolingResults:
        """See ``PoolingClient.encode``."""
        # Clients may use one id for several requests.
        unique = replace(request, request_id=f"{request.request_id}-{next(self._numbers)}")
        try:
            reader: AnswerReader[PoolingResults] = await self._core.open_reader(unique)
        except ModelLoadingError:
            # The adapter was replaced: refresh the names, so that a retry sees the new one.
            await self._core.refresh()
            raise ModelLoadingError(request.model) from None
        try:
            return await reader.results()
        except asyncio.CancelledError:
            await self._core.abort(unique.request_id)
            raise


def check_tasks(model: PoolingModel, name: str, tasks: Sequence[Task]) -> PoolingModel:
    """Return a model; raise InvalidRequestError if it can do none of the tasks."""
    if not set(tasks).intersection(model.info.tasks):
        raise InvalidRequestError(
            f"{name} cannot {' or '.join(tasks)}; it can {', '.join(model.info.tasks)}.",
            param="model",
        )
    return model


def _may_pool(status: ModelStatus) -> bool:
    """True unless a model is known to be of another kind."""
    return status.model is None or isinstance(status.model, PoolingModel)
