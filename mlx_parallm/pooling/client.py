"""Finds the pooling models, and sends requests to them, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from secrets import token_hex

from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.status import ModelStatus, RequestDoor
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadingError
from mlx_parallm.types.pooling import PoolingResults, PoolRequest, Task


class PoolingClient:
    """The pooling models behind a door."""

    def __init__(self, door: RequestDoor) -> None:
        self._door = door

    def models(self) -> Sequence[PoolingModel]:
        """Return those that requests may name, in the order they were given."""
        models = (status.model for status in self._door.statuses())
        return [model for model in models if isinstance(model, PoolingModel)]

    def find(self, name: str) -> ModelStatus | None:
        """Return the pooling model, or the adapter of one, of this name; None if there is none."""
        status = self._door.find(name)
        return status if status is not None and _may_pool(status) else None

    def get(self, name: str | None, *tasks: Task) -> PoolingModel:
        """Return the model or adapter of this name, or the one made most for one of the tasks.

        Raises:
            ModelNotFoundError: none has the name.
            ModelLoadingError: it is loaded for the first time; see ``RequestDoor.wait``.
            InvalidRequestError: it is a model that generates; it can do none of the tasks.
        """
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
        status = self._door.find(name)
        if status is None:
            raise self._door.not_found(name)
        if not _may_pool(status):
            raise status.wrong_kind(name)
        model: PoolingModel | None = status.model
        if model is None:
            raise ModelLoadingError(name)
        return check_tasks(model, name, tasks)

    async def encode(self, request: PoolRequest) -> PoolingResults:
        """Return the result of each input's task, float32; see ``Task`` for the shapes.

        Raises:
            OverloadedError: too many inputs wait.
            StepError: the model failed.
            ShuttingDownError, EngineDeadError: nothing is admitted any more.
        """
        # Clients may use one id for several requests.
        unique = replace(request, request_id=f"{request.request_id}-{token_hex(8)}")
        try:
            reader: AnswerReader[PoolingResults] = await self._door.open_reader(unique)
            return await reader.results()
        except ModelLoadingError:
            # The adapter was replaced: refresh the names, so that a retry sees the new one.
            await self._door.refresh()
            raise ModelLoadingError(request.model) from None
        except asyncio.CancelledError:
            await self._door.abort(unique.request_id)
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
