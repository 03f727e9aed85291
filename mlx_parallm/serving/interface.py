"""The engine as the HTTP layer sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.models import ModelMemory
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.engine.status import EngineLoad, EngineReport, ModelStatus, Readiness
from mlx_parallm.generation.model import GenerationModel, RequestHandle
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.types.errors import ModelNotFoundError
from mlx_parallm.types.pooling import PoolingResults, PoolRequest, Task
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.weights import WeightsVersion

#: ``TokenizingModel`` reads texts as tokens, whatever it makes of them.
TokenizingModel = GenerationModel | PoolingModel


class PoolingCalls(Protocol):
    """Models that encode, and what they compute."""

    def models(self) -> Sequence[PoolingModel]:
        """Those that requests may name, in the order they were given."""
        ...

    def get(self, name: str | None, *tasks: Task) -> PoolingModel:
        """Return the pooling model or adapter of this name, or the one made most for a task.

        Raises:
            ModelNotFoundError: none has the name.
            ModelLoadingError: it is loaded for the first time; see ``wait``.
            InvalidRequestError: it is a model that generates; it can do none of the tasks.
        """
        ...

    async def encode(self, request: PoolRequest) -> PoolingResults:
        """Return the result of each input's task, float32; see ``Task`` for the shapes.

        Raises:
            OverloadedError: too many inputs wait.
            StepError: the model failed.
            ShuttingDownError, EngineDeadError: nothing is admitted any more.
        """
        ...


class PoolingClient(PoolingCalls, Protocol):
    """The pooling models, seen from the event loop."""

    def find(self, name: str) -> ModelStatus | None:
        """Return the pooling model, or adapter of one, of this name; None if there is none."""
        ...

    async def wait(self, name: str) -> None:
        """Return once what is named in a ``ModelLoadingError`` is loaded.

        Raises:
            ModelNotFoundError: it was unloaded meanwhile.
            ModelLoadError: it cannot be loaded.
        """
        ...


class Versions(Protocol):
    """The adapters and the versions of weights that requests see."""

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters of all models, as of the latest change of one."""
        ...

    def version(self, model: str | None = None) -> WeightsVersion:
        """Return the version of a model's weights; default: the first model."""
        ...


class RequestClient(Protocol):
    """The engine as routes see it that only send requests, in whichever process they run."""

    @property
    def control(self) -> Versions:
        """Return the view of adapters and versions."""
        ...

    @property
    def config(self) -> EngineConfig:
        """The settings it was built from."""
        ...

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the models of every kind that requests may name, and those being loaded."""
        ...

    def find(self, name: str) -> ModelStatus | None:
        """Return the model of any kind, or the adapter, with this name; None if there is none."""
        ...

    def not_found(self, name: str) -> ModelNotFoundError:
        """Return the error for a name that nothing has; it lists what is served."""
        ...

    def models(self) -> Sequence[GenerationModel]:
        """Return the loaded models that generate, in the order they were given."""
        ...

    def first_model(self) -> GenerationModel:
        """Return the first of them; raise InvalidRequestError if there is none."""
        ...

    def get_model(self, name: str) -> GenerationModel:
        """Return the model or adapter of this name.

        Raises:
            ModelNotFoundError: none has it.
            InvalidRequestError: it is a pooling model.
        """
        ...

    @property
    def pooling(self) -> PoolingClient:
        """The models that read texts instead of continuing them."""
        ...

    async def check_room(self, model: str, client: str, n: int) -> None:
        """Refuse ``n`` samples of a client early, before their prompt is encoded.

        It costs nearly nothing; ``submit`` decides.

        Raises:
            OverloadedError: the queue had no room for them a moment ago.
        """
        ...

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        """Admit a request.

        Raises:
            InvalidRequestError, ContextLengthError: it can never be served.
            OverloadedError: the queue is full.
            ShuttingDownError, EngineDeadError: nothing is admitted any more.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request between two steps and free its blocks; unknown ids are ignored."""
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

    async def train(self, request: TrainingRequest) -> tuple[Any, ...]:
        """Have ops of a training session run; return the result of each.

        Raises:
            SessionLostError: the engine does not have the session.
            ModelNotFoundError, InvalidRequestError: as the ops say.
            PausedError, RequestAbortedError, ShuttingDownError, EngineDeadError: they were not run,
                or not all.
        """
        ...

    def open_requests(self) -> Sequence[GenerateRequest]:
        """Return the requests that were submitted and have not ended."""
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
