"""The kind of models that generate, and its client, as the event loop knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.kind import Kind, ModelFolder
from mlx_parallm.engine.status import RequestDoor
from mlx_parallm.generation.event_stream import EventStream
from mlx_parallm.generation.model import GENERATION_TRAITS, GenerationModel, RequestHandle
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest

if TYPE_CHECKING:
    from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
    from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer


@dataclass(frozen=True, slots=True)
class GenerationTokenizers:
    """The tokenizers of a folder.

    Attributes:
        output: of what the model generates, and of its prompts.
        sides: both sides of an encoder-decoder's tokenizer; None for a decoder.
    """

    output: ParallmTokenizer
    sides: Seq2SeqTokenizer | None = None

    @property
    def description(self) -> str:
        """Return their class."""
        return (self.sides or self.output).description


def read_tokenizers(folder: ModelFolder) -> GenerationTokenizers:
    """Return the tokenizers of a folder.

    Raises:
        ConfigError: the chat template cannot be read.
        ModelLoadError: the folder has none.
    """
    # They bring MLX, which the process of a server without an engine imports for this alone.
    from mlx_parallm.tokenizer.loading import load_tokenizer  # noqa: PLC0415
    from mlx_parallm.tokenizer.seq2seq.loading import load_seq2seq  # noqa: PLC0415

    config, path = folder.config, folder.path
    with load_failures(path):
        tokenizer = load_tokenizer(
            path, chat_template=config.chat_template, trust_remote_code=config.trust_remote_code
        )
        return GenerationTokenizers(tokenizer, load_seq2seq(path, tokenizer))


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
            InvalidRequestError: it is a pooling model.
        """
        status = self._door.find(name)
        if status is None:
            raise self._door.not_found(name)
        if not isinstance(status.model, GenerationModel):
            raise status.wrong_kind(name)
        return status.model

    async def check_room(self, model: str, client: str, n: int) -> None:
        """Refuse ``n`` samples of a client early; see ``RequestDoor.check_queue``."""
        served = self.get_model(model)
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


#: ``GENERATION``: the kind, whose ``client`` routes use.
GENERATION = GenerationKind()
