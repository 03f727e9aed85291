"""Requests to models that generate, on the event loop's side."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.engine.core import EngineCore
from mlx_parallm.generation.event_stream import EventStream
from mlx_parallm.generation.model import GenerationModel, RequestHandle
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest


class GenerationClient:
    """Finds models that generate and submits requests to them."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def models(self) -> Sequence[GenerationModel]:
        """Return the loaded models that generate, in the order they were given."""
        models = (status.model for status in self._core.statuses())
        return [model for model in models if isinstance(model, GenerationModel)]

    def first_model(self) -> GenerationModel:
        """Return the first of them; raise InvalidRequestError if there is none."""
        models = self.models()
        if not models:
            raise InvalidRequestError("No model that generates is served here.", param="model")
        return models[0]

    def get_model(self, name: str) -> GenerationModel:
        """Return the model or adapter of this name.

        Raises:
            ModelNotFoundError: none has it.
            InvalidRequestError: it does not generate.
        """
        status = self._core.find(name)
        if status is None:
            raise self._core.not_found(name)
        if not isinstance(status.model, GenerationModel):
            raise status.wrong_kind(name)
        return status.model

    async def check_room(self, model: str, client: str, n: int) -> None:
        """Refuse ``n`` samples of a client early; see ``EngineClient.check_room``."""
        served = self.get_model(model)
        await self._core.check_queue(served.parent or served.names[0], client, n)

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        """Admit a request; see ``EngineClient.submit``."""
        self._core.check_open()
        self.get_model(request.model)
        stream: EventStream = await self._core.open_reader(request)
        return RequestHandle(request_id=request.request_id, events=stream, gather=stream.gather)

    def open_requests(self) -> Sequence[GenerateRequest]:
        """Return the requests that were submitted and have not ended."""
        requests = self._core.all_requests()
        return [request for request in requests if isinstance(request, GenerateRequest)]
