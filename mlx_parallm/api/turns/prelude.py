"""The beginning of every generating route: client, settings, model, and room in the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar, get_args

from fastapi import Depends, Request

from mlx_parallm.api.http.auth import caller_of
from mlx_parallm.api.http.declared import TOKENIZE_HINT
from mlx_parallm.api.http.keep_alive import KeepAliveTime
from mlx_parallm.api.http.offload import in_thread, on_body
from mlx_parallm.api.http.scopes import engine_for
from mlx_parallm.api.turns.generation import Fields, Generation, named_by
from mlx_parallm.api.turns.images import DATA, Images
from mlx_parallm.engine.models import name_for
from mlx_parallm.generation.admission import check_room
from mlx_parallm.generation.kind import GENERATION, GenerationClient
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.interface import RequestClient, TokenizingModel
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError, RequestTooLargeError
from mlx_parallm.types.pooling import Task
from mlx_parallm.types.request import GenerateRequest


def generator(
    engine: RequestClient,
    model: str | None,
    adapter: str | None = None,
    *,
    field: str = "adapter",
    takes_sources: bool = False,
) -> tuple[str, GenerationModel]:
    """Return the name for the answer, and the model or adapter that generates.

    An adapter is a name of its own, or belongs to the model that is given. Without either it is
    the first model that generates and that the route serves.

    Args:
        engine: serves the models.
        model: the body's model.
        adapter: the body's adapter, where the route has such a field.
        field: what the body calls the adapter.
        takes_sources: True if the route serves encoder-decoders too.

    Raises:
        ModelNotFoundError: nothing has this name; names the field.
        InvalidRequestError: the name is a pooling model's or an encoder-decoder's, or no model
            generates.
    """
    client = GENERATION.client(engine)
    name = model if adapter is None else adapter if model is None else f"{model}:{adapter}"
    if name is None:
        chosen = _first(client, takes_sources=takes_sources)
    else:
        try:
            chosen = client.get_model(name)
        except ModelNotFoundError as error:
            error.param = field if adapter is not None else error.param
            raise
    name = adapter or name_for(chosen, model)
    if not takes_sources:
        refuse_sources(chosen, name)
    return name, chosen


def _first(client: GenerationClient, *, takes_sources: bool) -> GenerationModel:
    able = (model for model in client.models() if takes_sources or not model.takes_sources)
    return next(able, None) or client.first_model()


def refuse_sources(
    model: GenerationModel, name: str, why: str = "is not served here; use /v1/completions"
) -> GenerationModel:
    """Return a model; raise InvalidRequestError if it is an encoder-decoder, which ``why``."""
    if model.takes_sources:
        raise InvalidRequestError(
            f"{name} is an encoder-decoder, which {why}.", param="model", code="unsupported_model"
        )
    return model


def tokenizing_model(engine: RequestClient, name: str | None) -> TokenizingModel:
    """Return the model of this name, else the first that generates, else the first pooling model.

    Raises:
        ModelNotFoundError: nothing has this name.
        InvalidRequestError: no model is served that reads tokens.
    """
    pooling = encoder_meant(engine, name, *get_args(Task))
    return pooling or generator(engine, name, takes_sources=True)[1]


def encoder_meant(engine: RequestClient, name: str | None, *tasks: Task) -> PoolingModel | None:
    """Return the pooling model of a request; None if it is for a model that generates.

    Without a name, models that generate come first.

    Args:
        engine: serves the models.
        name: the body's model.
        tasks: the model must be able to do one of them.

    Raises:
        ModelLoadingError: the model is loaded for the first time.
        InvalidRequestError: it can do none of the tasks, or nothing is served that could.
    """
    if (
        GENERATION.client(engine).models()
        if name is None
        else POOLING.client(engine).find(name) is None
    ):
        return None
    return POOLING.client(engine).get(name, *tasks)


T = TypeVar("T")
ESCAPED_SLASH = b"\\/"

NO_FIELDS: Fields = {}


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request whose samples the queue had room for, and who answers it.

    Attributes:
        prelude: what was known of the request before.
        name: what the answer calls the model.
        model: generates.
        stay: the time that the model is to stay in memory.
    """

    prelude: Prelude
    name: str
    model: GenerationModel
    stay: KeepAliveTime

    async def start(self, requests: Sequence[GenerateRequest], fields: Fields) -> Generation:
        """Submit every request to the engine, or none; see ``Generation.start``."""
        prelude = self.prelude
        generation = await Generation.start(
            prelude.engine, requests, fields=fields, max_waiting=prelude.max_waiting
        )
        self.stay.set(prelude.engine, self.model.names[0])
        return generation


@dataclass(frozen=True, slots=True)
class Prelude:
    """A request before its body is worked on; only ``admit`` goes on from here.

    Attributes:
        request: of HTTP.
        engine: as the caller may use it.
        config: the server's settings.
        client: whose request it is.
        max_waiting: how many sequences the queue holds; None: not known.
        images: prepares the images of conversations.
    """

    request: Request
    engine: RequestClient
    config: ServerConfig
    client: str
    max_waiting: int | None
    images: Images

    @property
    def answer_id(self) -> str:
        """An id that is unique among the requests in flight."""
        return self.request.state.answer_id

    def check_room(self, num_prompts: int, n: int = 1) -> None:
        """Refuse more samples than an empty queue could hold, before prompts are looked at.

        Raises:
            InvalidRequestError: see there.
        """
        if self.max_waiting is not None:
            check_room(num_prompts, n, self.max_waiting)

    async def on_body(self, work: Callable[[], T]) -> T:
        """Return what ``work`` makes of the body; see ``offload.on_body``."""
        return await on_body(len(await self.request.body()), work)

    async def check_texts(self, image_urls: Iterable[str]) -> None:
        """Refuse to count the tokens of more than ``max_tokenize_bytes`` besides images.

        Args:
            image_urls: of the images in the body, each as often as it has it.

        Raises:
            RequestTooLargeError: the body has more.
        """
        body, most = await self.request.body(), self.config.max_tokenize_bytes
        if len(body) <= most:
            return
        # Some clients escape slashes, also those of base64.
        num_escapes = await in_thread(lambda: body.count(ESCAPED_SLASH))
        if len(body) - num_escapes - sum(map(_written_size, image_urls)) > most:
            raise RequestTooLargeError(
                f"The body without its images is larger than {most} bytes.{TOKENIZE_HINT}"
            )

    async def admit(
        self,
        model: str | None,
        adapter: str | None = None,
        *,
        n: int = 1,
        num_prompts: int = 1,
        fields: Fields = NO_FIELDS,
        takes_sources: bool = False,
    ) -> Admitted:
        """Choose the model that generates, and refuse what the queue has no room for.

        Args:
            model: the body's model.
            adapter: the body's adapter, where the route has such a field.
            n: samples of each prompt.
            num_prompts: prompts of the body.
            fields: what the body calls the engine's names.
            takes_sources: see ``generator``.

        Raises:
            ModelNotFoundError: nothing has this name.
            InvalidRequestError: the model does not generate, or not even an empty queue could hold
                the samples.
            OverloadedError: the queue is full.
        """
        name, chosen = generator(self.engine, model, adapter, takes_sources=takes_sources)
        return await self.admit_to(chosen, name, n=n, num_prompts=num_prompts, fields=fields)

    async def admit_to(
        self,
        model: GenerationModel,
        name: str,
        *,
        n: int = 1,
        num_prompts: int = 1,
        fields: Fields = NO_FIELDS,
    ) -> Admitted:
        """Refuse what the queue of a chosen model has no room for; see ``admit``."""
        with named_by(fields):
            self.check_room(num_prompts, n)
            await GENERATION.client(self.engine).check_room(
                model.names[0], self.client, num_prompts * n
            )
        return Admitted(self, name, model, KeepAliveTime.of(self.request))


def _written_size(url: str) -> int:
    """Return the bytes that an image takes in a body at least: its URL, or its data alone."""
    return len(url) - (url.find(",") + 1 if url.startswith(DATA) else 0)


async def get_prelude(request: Request) -> Prelude:
    """Return what is known of a request before its body is worked on."""
    caller, state = caller_of(request), request.app.state
    return Prelude(
        request=request,
        engine=engine_for(caller, state.engine, state.config),
        config=state.config,
        client=caller.client,
        max_waiting=caller.max_waiting,
        images=state.images,
    )


PreludeDep = Annotated[Prelude, Depends(get_prelude)]
