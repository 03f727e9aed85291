"""Finds the nets, and sends requests to them, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.status import RequestDoor
from mlx_parallm.nets.model import NetModel
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadingError
from mlx_parallm.types.nets import NetRequest, NetResults


class NetClient:
    """The nets behind a door."""

    def __init__(self, door: RequestDoor) -> None:
        self._door = door

    def models(self) -> Sequence[NetModel]:
        """Return those that requests may name, in the order they were given."""
        models = (status.model for status in self._door.statuses())
        return [model for model in models if isinstance(model, NetModel)]

    def get(self, name: str | None) -> NetModel:
        """Return the net of this name, or the first one.

        Raises:
            ModelNotFoundError: none has the name.
            ModelLoadingError: it is loaded for the first time; see ``RequestDoor.wait``.
            InvalidRequestError: it is a model of another kind; there is no net.
        """
        if name is None:
            models = self.models()
            if not models:
                raise InvalidRequestError("No net is served here.", param="model")
            return models[0]
        status = self._door.find(name)
        if status is None:
            raise self._door.not_found(name)
        if status.model is None:
            raise ModelLoadingError(name)
        if not isinstance(status.model, NetModel):
            raise status.wrong_kind(name)
        return status.model

    async def run(self, request: NetRequest) -> NetResults:
        """Return the outputs for a request's rows.

        Raises:
            ConflictError: the sequence that it continues is not kept.
            OverloadedError: too many rows wait.
            StepError: the net failed.
            ShuttingDownError, EngineDeadError: nothing is admitted any more.
        """
        try:
            reader: AnswerReader[NetResults] = await self._door.open_reader(request)
            return await reader.results()
        except asyncio.CancelledError:
            await self._door.abort(request.request_id)
            raise
