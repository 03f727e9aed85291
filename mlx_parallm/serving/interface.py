"""The engine as the HTTP layer sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.directory import ModelDirectory
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.models import EngineState, ModelMemory
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.engine.status import EngineLoad, EngineReport, ModelStatus, Readiness, RequestDoor
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.types.request import WeightsVersion

#: ``TokenizingModel`` reads texts as tokens, whatever it makes of them.
TokenizingModel = GenerationModel | PoolingModel


class Versions(Protocol):
    """The adapters and the versions of weights that requests see."""

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters of all models, as of the latest change of one."""
        ...

    def version(self, model: str | None = None) -> WeightsVersion:
        """Return the version of a model's weights; default: the first model."""
        ...


class RequestClient(RequestDoor, Protocol):
    """The engine as routes see it that only send requests, in whichever process they run.

    A kind of models has a client for it: see ``Kind.client``.
    """

    @property
    def control(self) -> Versions:
        """Return the view of adapters and versions."""
        ...

    @property
    def config(self) -> EngineConfig:
        """The settings it was built from."""
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request as ``abort`` does, and notify its reader.

        Every sample gets a last event with the ``finish_reason`` "abort" and the text that was
        held back.
        """
        ...


class EngineClient(RequestClient, Protocol):
    """The engine as routes see it that change it or report its state."""

    @property
    def control(self) -> EngineControl:
        """Return the commands of an operator."""
        ...

    @property
    def directory(self) -> ModelDirectory:
        """Return the models that requests may name."""
        ...

    async def load_model(self, load: ModelLoad, /) -> ModelStatus:
        """Serve one more model; return once it is loaded.

        Raises:
            InvalidRequestError: it may not be loaded, cannot be, or its name is taken.
            NotFoundError: there is no such folder.
        """
        ...

    async def unload_model(self, name: str) -> ModelStatus:
        """Admit no more requests of a model, and free its memory once those have ended.

        Its adapters go with it.

        Raises:
            ModelNotFoundError: none has the name.
            InvalidRequestError: it is an adapter, or cannot be unloaded.
        """
        ...

    def ask_each(self, question: Callable[[EngineState], Any], /) -> Sequence[Future[Any]]:
        """Ask every engine that serves; see ``Ask``.

        Raises:
            EngineDeadError: no engines are there.
        """
        ...

    async def train(self, request: TrainingRequest) -> tuple[Any, ...]:
        """Have ops of a training session run; return the result of each.

        Raises:
            SessionLostError: the engine does not have the session.
            ModelNotFoundError, InvalidRequestError: as the ops say.
            PausedError, RequestAbortedError, ShuttingDownError, EngineDeadError: they were not run,
                or not all.
        """
        ...

    def open_requests(self) -> Sequence[Any]:
        """Return the requests of all kinds that were admitted and have not ended."""
        ...

    async def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        ...

    async def engines(self) -> Sequence[EngineReport]:
        """Return how busy each engine is, and whether it gets requests."""
        ...

    def readiness(self) -> Sequence[Readiness]:
        """Return whether each engine gets requests."""
        ...

    def steps_s(self) -> Sequence[float]:
        """Return for how long the step in flight of each engine has run, in seconds."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine thread is dead."""
        ...

    def check_open(self) -> None:
        """Raise ShuttingDownError or EngineDeadError if nothing is admitted any more."""
        ...

    async def memory(self) -> Mapping[str, ModelMemory]:
        """Return the memory of each model, by its first name."""
        ...

    async def render_metrics(self) -> tuple[bytes, str]:
        """Return the Prometheus exposition and its content type."""
        ...
