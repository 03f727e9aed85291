"""``EncoderClient`` on the event loop's side: the loaded encoders, and requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mlx_parallm.encode import EncodeRequest, EncodeResults, Task
from mlx_parallm.engine.commands import Abort, Command, Encode
from mlx_parallm.engine.interface import EncoderModel, ServedModel
from mlx_parallm.errors import InvalidRequestError, ParallmError


class EngineThread(Protocol):
    """What this needs of the engine whose thread runs the encoders."""

    def check_open(self) -> None:
        """Raise ShuttingDownError or EngineDeadError if nothing is admitted any more."""
        ...

    def get_model(self, name: str) -> ServedModel:
        """The model that generates of this name; raise ModelNotFoundError."""
        ...

    async def ask(self, command: Callable[[Callable[[Any], None]], Command]) -> Any:
        """What the thread replies to a command; raise EngineDeadError if it dies before that."""
        ...

    def tell(self, command: Command) -> None:
        """Send a command that nobody waits for."""
        ...

    def note_open(self) -> None:
        """Something has been opened or closed: find out whether the engine is idle."""
        ...


class AsyncEncoders:
    """Implements ``EncoderClient``."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._by_name: dict[str, EncoderModel] = {}
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Requests that are not answered."""
        return self._num_open

    def replace(self, models: Sequence[EncoderModel]) -> None:
        """The engine thread has loaded these, and nothing else."""
        self._by_name = {name: one for one in models for name in one.names}

    def models(self) -> Sequence[EncoderModel]:
        """See ``EncoderClient.models``."""
        return list({id(model): model for model in self._by_name.values()}.values())

    def find(self, name: str) -> EncoderModel | None:
        """The encoder of this name."""
        return self._by_name.get(name)

    def get(self, name: str | None, *tasks: Task) -> EncoderModel:
        """See ``EncoderClient.get``."""
        wanted = set(tasks)
        if name is None:
            able = [one for one in self.models() if wanted.intersection(one.info.tasks)]
            if not able:
                raise InvalidRequestError(
                    f"No model that can {' or '.join(tasks)} is served here.", param="model"
                )
            return able[0]
        found = self._by_name.get(name)
        if found is None:
            self._thread.get_model(name)
            raise InvalidRequestError(f"{name} generates; it is no encoder.", param="model")
        if not wanted.intersection(found.info.tasks):
            raise InvalidRequestError(
                f"{name} cannot {' or '.join(tasks)}; it can {', '.join(found.info.tasks)}.",
                param="model",
            )
        return found

    async def encode(self, request: EncodeRequest) -> EncodeResults:
        """See ``EncoderClient.encode``."""
        self._thread.check_open()
        self._num_open += 1
        self._thread.note_open()
        try:
            result = await self._thread.ask(lambda reply: Encode(request=request, reply=reply))
        except asyncio.CancelledError:
            self._thread.tell(Abort(request_id=request.request_id))
            raise
        finally:
            self._num_open -= 1
            self._thread.note_open()
        if isinstance(result, ParallmError):
            raise result
        return result
