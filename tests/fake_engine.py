"""An engine without a model: scripted events, over the HTTP layer served by a real uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import uvicorn

from mlx_parallm.api.http.connection import BoundedProtocol
from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.ledger import Claim
from mlx_parallm.engine.models import ModelMemory, QueueLoad, ServedModel
from mlx_parallm.engine.status import EngineLoad, EngineReport, ModelState, ModelStatus, Readiness
from mlx_parallm.generation.model import GenerationModel, RequestHandle
from mlx_parallm.parsing.families.json_calls import HERMES
from mlx_parallm.parsing.turn import THINK
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.types.errors import (
    EngineDeadError,
    ModelNotFoundError,
    OverloadedError,
    ParallmError,
    SessionLostError,
    ShuttingDownError,
)
from mlx_parallm.types.events import (
    ErrorEvent,
    FinishReason,
    GenerateEvent,
    PromptEvent,
    TokenEvent,
)
from mlx_parallm.types.pooling import PoolRequest
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import TokenLogprob
from mlx_parallm.types.work import StateCache
from tests.api_app import make_app
from tests.fake_control import FakeControl
from tests.fakes import EOS, ByteTokenizer, make_info

Script = Callable[[GenerateRequest], AsyncIterator[GenerateEvent]]


def scores(request: GenerateRequest) -> tuple[TokenLogprob | None, ...] | None:
    """Return a log-probability per prompt token, none for the first."""
    if request.params.prompt_logprobs is None:
        return None
    return (None, *(TokenLogprob(i, -0.25, ((i, -0.25),)) for i in request.prompt_ids[1:]))


def prompt_event(request: GenerateRequest) -> PromptEvent:
    """Return the first event of a request; three of its tokens were cached, four are now."""
    return PromptEvent(
        request_id=request.request_id,
        num_cached_tokens=3,
        num_newly_cached_tokens=4,
        prompt_logprobs=scores(request),
    )


def write(text: str) -> Script:
    """Return a script that writes ``text``, a byte per token, to each sample in turn, then EOS."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield prompt_event(request)
        limit = request.params.max_tokens
        ids = [*text.encode(), EOS][:limit]
        for place in range(max(1, len(ids))):
            for index in range(request.params.n):
                yield token_event(request, index, ids[place : place + 1], place + 1 >= len(ids))

    return script


def token_event(
    request: GenerateRequest, index: int, ids: Sequence[int], is_last: bool
) -> TokenEvent:
    """Return an event of zero or one byte."""
    wanted = request.params.logprobs is not None
    reason = FinishReason.STOP if list(ids) == [EOS] else FinishReason.LENGTH
    return TokenEvent(
        request_id=request.request_id,
        index=index,
        token_ids=tuple(ids),
        text=bytes(i for i in ids if i < EOS).decode(),
        logprobs=tuple(TokenLogprob(i, -0.5, ((i, -0.5),)) for i in ids) if wanted else (),
        finish_reason=reason if is_last else None,
    )


def fail(error: ParallmError, *, after: str = "") -> Script:
    """Return a script that writes some text and then fails; without text, before the prompt."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        if after:
            yield prompt_event(request)
            for byte in after.encode():
                yield token_event(request, 0, [byte], is_last=False)
        yield ErrorEvent(request_id=request.request_id, error=error)

    return script


def hang(*, after: str = "") -> Script:
    """Return a script that writes some text and then waits forever, like a slow step."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        if after:
            yield prompt_event(request)
            for byte in after.encode():
                yield token_event(request, 0, [byte], is_last=False)
        await asyncio.Event().wait()

    return script


def status_of(model: ServedModel) -> ModelStatus:
    return ModelStatus(
        names=model.names,
        root=model.root,
        state=ModelState.LOADED,
        progress=1.0,
        is_pinned=False,
        model=model,
    )


class FakePooling(Protocol):
    """An owner of a door to pooling models."""

    @property
    def thread(self) -> Any: ...


class FakeStream:
    """Reads the events of a handle. Stands for ``EventStream``."""

    def __init__(self, handle: RequestHandle) -> None:
        self._events = handle.events
        self.gather = handle.gather

    def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        return self._events


class FakeDirectory:
    """In place of ``ModelDirectory``: its models stay in memory for ever."""

    def own_folder(self, name: str) -> None:
        del name

    async def watch(self) -> None:
        pass

    def expires_in_s(self, name: str) -> float | None:
        return None

    def claims(self) -> tuple[Sequence[Claim], int | None]:
        return (), None


class FakeEngine:
    """Implements ``EngineClient``; tests set what comes next and see what was asked."""

    def __init__(
        self, tokenizer: ByteTokenizer | None = None, *, state_cache: StateCache | None = None
    ) -> None:
        self.script: Script = write("hello")
        self.refusal: ParallmError | None = None
        self.is_dead = False
        self.is_shutting_down = False
        self.is_full = False
        self.states = [Readiness.READY]
        self.submitted: queue.Queue[GenerateRequest] = queue.Queue()
        self.aborted: queue.Queue[str] = queue.Queue()
        self.open: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.engine_config = EngineConfig()
        self.control = FakeControl()
        self.directory: Any = FakeDirectory()
        #: The time that bodies have asked for, by the model's name.
        self.ttls: dict[str, float | None] = {}
        #: The pooling models beside the model that generates; None if there are none.
        self.pooling: FakePooling | None = None
        self._pooled: set[str] = set()
        self._model = GenerationModel(
            names=("org/fake", "alias"),
            root="/models/fake",
            created=1,
            tokenizer=tokenizer or ByteTokenizer(),
            info=make_info(),
            state_cache=state_cache,
            tool_format=HERMES,
            reasoning_format=THINK,
        )

    def reset(self) -> None:
        """Answer as at first again, and forget what was submitted and aborted."""
        self.script, self.refusal = write("hello"), None
        for requests in (self.submitted, self.aborted):
            while not requests.empty():
                requests.get()

    def statuses(self) -> Sequence[ModelStatus]:
        pooling = () if self.pooling is None else self.pooling.thread.statuses()
        return [*map(status_of, self.models()), *pooling]

    def find(self, name: str) -> ModelStatus | None:
        for info in self.control.adapters():
            if info.name == name:
                return replace(status_of(self.get_model(name)), parent=info.model)
        return next((each for each in self.statuses() if name in each.names), None)

    def set_ttl(self, name: str, ttl_s: float | None) -> None:
        self.ttls[name] = ttl_s

    def not_found(self, name: str) -> ModelNotFoundError:
        return ModelNotFoundError(name)

    async def load_model(self, load: ModelLoad) -> ModelStatus:
        raise ModelNotFoundError(load.model)

    async def unload_model(self, name: str) -> ModelStatus:
        raise ModelNotFoundError(name)

    def ask_each(self, question: Callable[..., Any], /) -> Sequence[Future[Any]]:
        raise NotImplementedError

    def first_model(self) -> GenerationModel:
        return self.models()[0]

    def models(self) -> Sequence[GenerationModel]:
        return [self._model]

    def get_model(self, name: str) -> GenerationModel:
        for info in self.control.adapters():
            if info.name == name:
                return replace(self._model, names=(name,), parent=info.model, adapter=name)
        if name not in self._model.names:
            raise ModelNotFoundError(name)
        return self._model

    async def wait(self, name: str, client: str = "") -> None:
        if name in self._model.names:
            return
        if self.pooling is not None:
            await self.pooling.thread.wait(name, client)
        elif self.find(name) is None:
            raise ModelNotFoundError(name)

    async def refresh(self) -> None:
        pass

    async def check_queue(self, model: str, client: str, n: int) -> None:
        if self.is_full:
            raise OverloadedError("Full.")

    async def open_reader(self, request: Any) -> Any:
        if not isinstance(request, PoolRequest):
            return FakeStream(await self.submit(request))
        if self.pooling is None:
            raise ModelNotFoundError(request.model)
        self._pooled.add(request.request_id)
        return await self.pooling.thread.open_reader(request)

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.put(request)
        return RequestHandle(request_id=request.request_id, events=self.script(request))

    async def abort(self, request_id: str) -> None:
        if self.pooling is not None and request_id in self._pooled:
            await self.pooling.thread.abort(request_id)
        else:
            self.aborted.put(request_id)

    @property
    def config(self) -> EngineConfig:
        return self.engine_config

    async def train(self, request: TrainingRequest) -> tuple[Any, ...]:
        raise SessionLostError(f"{request.session} is not here")

    def open_requests(self) -> Sequence[GenerateRequest]:
        return self.open

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def memory(self) -> Mapping[str, ModelMemory]:
        return {model.names[0]: ModelMemory(weights=7) for model in self.models()}

    async def load(self) -> EngineLoad:
        return EngineLoad(num_requests=3, num_running=2, num_waiting=1)

    async def engines(self) -> Sequence[EngineReport]:
        load = QueueLoad(
            num_running=2,
            num_waiting=1,
            num_waiting_tokens=7,
            num_used_tokens=16,
            num_kv_tokens=64,
            num_requests=3,
        )
        return [
            EngineReport(
                rank=rank,
                readiness=each,
                load=QueueLoad() if each is Readiness.STARTING else load,
            )
            for rank, each in enumerate(self.states)
        ]

    def readiness(self) -> Sequence[Readiness]:
        return self.states

    def steps_s(self) -> Sequence[float]:
        return [0.0] * len(self.states)

    def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError("The engine thread died.")

    def check_open(self) -> None:
        self.check_health()
        if self.is_shutting_down:
            raise ShuttingDownError("The server is shutting down.")

    async def render_metrics(self) -> tuple[bytes, str]:
        return b"fake 1\n", "text/plain; version=1.0.0"


def _patient(config: ServerConfig) -> ServerConfig:
    """Return the configuration without default limits that a busy machine could reach."""
    default = ServerConfig()
    limits = {
        name: 0.0
        for name in ("client_timeout_s", "sse_keep_alive_s")
        if getattr(config, name) == getattr(default, name)
    }
    return replace(config, **limits)


@contextlib.contextmanager
def serve_fake(
    engine: FakeEngine,
    config: ServerConfig | None = None,
    *,
    max_waiting: int | None = None,
    bound_to: str | None = None,
) -> Iterator[str]:
    """Serve the application over a fake engine on a free port; yield its URL."""
    config = _patient(config or ServerConfig())
    app = make_app(engine, config, max_waiting=max_waiting, bound_to=bound_to)
    http: Any = partial(BoundedProtocol, timeout_s=config.client_timeout_s)
    server = uvicorn.Server(
        uvicorn.Config(app, http=http, log_config=None, ws="none", lifespan="on")
    )
    # The socket listens from now on: requests wait in its backlog until the server has started.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def leave(url: str, path: str, body: dict[str, Any], wait: Callable[[], object]) -> None:
    """Send a request, call ``wait`` and close the connection."""
    raw = json.dumps(body).encode()
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (path.encode(), len(raw), raw)
        )
        wait()
