"""The kind of models that generate, and its client, as the event loop knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.kind import BuildContext, Kind, ModelFolder, OpenModel
from mlx_parallm.engine.status import ModelState, RequestDoor
from mlx_parallm.generation.event_stream import EventStream
from mlx_parallm.generation.model import GENERATION_TRAITS, GenerationModel, RequestHandle
from mlx_parallm.generation.tokenizers import GenerationTokenizers, read_tokenizers
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadingError
from mlx_parallm.types.request import GenerateRequest

if TYPE_CHECKING:
    from mlx_parallm.engine.metrics import MetricFamilies
    from mlx_parallm.generation.pending import PendingGenerationModel
    from mlx_parallm.worker.worker import Worker


class GenerationClient:
    """The models behind a door that generate."""

    def __init__(self, door: RequestDoor) -> None:
        self._door = door

    def models(self) -> Sequence[GenerationModel]:
        """Return the loaded models that generate, in the order they were given."""
        models = (status.model for status in self._door.statuses())
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
            ModelLoadingError: it is loaded for the first time; see ``RequestDoor.wait``.
            InvalidRequestError: it is a pooling model.
        """
        status = self._door.find(name)
        if status is None:
            raise self._door.not_found(name)
        if status.model is None:
            raise ModelLoadingError(name)
        if not isinstance(status.model, GenerationModel):
            raise status.wrong_kind(name)
        return status.model

    async def check_room(self, model: str, client: str, n: int) -> None:
        """Refuse ``n`` samples of a client early; see ``RequestDoor.check_queue``.

        Raises:
            ModelLoadingError: the model is not in memory; see ``RequestDoor.wait``.
        """
        served = self.get_model(model)
        status = self._door.find(model)
        if status is not None and status.state is not ModelState.LOADED:
            raise ModelLoadingError(model)
        await self._door.check_queue(served.parent or served.names[0], client, n)

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        """Admit a request.

        Raises:
            InvalidRequestError, ContextLengthError: it can never be served.
            OverloadedError: the queue is full.
            ShuttingDownError, EngineDeadError: nothing is admitted any more.
        """
        self.get_model(request.model)
        stream: EventStream = await self._door.open_reader(request)
        return RequestHandle(request_id=request.request_id, events=stream, gather=stream.gather)


class GenerationKind(Kind[GenerationClient]):
    """Models that continue tokens."""

    traits = GENERATION_TRAITS

    @override
    def client(self, door: RequestDoor) -> GenerationClient:
        return GenerationClient(door)

    @override
    def serves(self, config: ModelConfig, path: Path) -> bool:
        """Mlx_lm says at load what it cannot run."""
        del config, path
        return True

    def read(self, config: ModelConfig, path: Path, settings: EngineConfig) -> OpenModel:
        """Read the tokenizers; see ``Kind``."""
        folder = ModelFolder(config, path)
        return OpenGeneration(folder, settings, read_tokenizers(folder))


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """Opens a model on the engine thread, perhaps in another process. Implements ``OpenModel``."""

    folder: ModelFolder
    settings: EngineConfig
    tokenizers: GenerationTokenizers

    def __call__(self, families: MetricFamilies, worker: Worker) -> PendingGenerationModel:
        """Begin to load the folder; see ``PendingGenerationModel``.

        Raises:
            InvalidRequestError: models are divided among ranks here.
        """
        # The process that reads the folder may be without MLX.
        from mlx_parallm.generation.pending import PendingGenerationModel  # noqa: PLC0415

        if worker.ranks is not None:
            raise InvalidRequestError(
                f"{self.folder.names[0]} generates. Such models are divided among ranks here, "
                "which load them when the server starts.",
                param="model",
            )
        context = BuildContext(self.settings, families, worker, _ignore)
        return PendingGenerationModel(self.folder, self.tokenizers, context)


def _ignore(_text: str, _share: float) -> None:
    """Report no progress: the load's own commands do."""


#: ``GENERATION``: the kind, whose ``client`` routes use.
GENERATION = GenerationKind()
