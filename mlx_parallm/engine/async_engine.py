"""The bridge between an event loop and the engine thread.

One thread loads, steps and frees every model, because MLX's state is per thread. Requests and
control go in through one inbox; a step's events come back in one ``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.admission import check_request
from mlx_parallm.engine.async_control import AsyncControl
from mlx_parallm.engine.commands import Abort, Call, Command, EngineHost, Stop, Submit
from mlx_parallm.engine.control_metrics import ControlMetrics
from mlx_parallm.engine.encoder_interface import ModelMemory
from mlx_parallm.engine.encoders.client import AsyncEncoders
from mlx_parallm.engine.interface import EngineLoad, RequestHandle, ServedModel
from mlx_parallm.engine.life import EngineLife, Loaded, LocalLife, TellProgress
from mlx_parallm.engine.mailbox import Mailbox
from mlx_parallm.engine.model_memory import model_memory
from mlx_parallm.engine.open_streams import OpenStreams
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.engine.state import EngineState, MetricsText
from mlx_parallm.types.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    ParallmError,
    RequestAbortedError,
    ShuttingDownError,
)
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.request import GenerateRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")


def ignore_progress(_text: str, _fraction: float) -> None:
    """Report nothing."""


class AsyncEngine:
    """Serves every model of a configuration to one event loop. Implements ``EngineClient``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: TellProgress = ignore_progress,
        life: EngineLife | None = None,
    ) -> None:
        """``life``: where the engines live; a thread of this process if it is not given."""
        self._config = config
        self._life = life or LocalLife(config, on_progress)
        self._registry = CollectorRegistry()
        self._mailbox = Mailbox()
        self._streams = OpenStreams()
        self._models: dict[str, ServedModel] = {}
        self._thread: threading.Thread | None = None
        self._loaded = threading.Event()
        self._cause: BaseException | None = None
        self._draining = False
        self._is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.control = AsyncControl(self, config.adapters, ControlMetrics(self._registry))
        self.encoders = AsyncEncoders(self, config)
        #: Set while no thread serves: after a death, until a restarted thread has loaded.
        self.died = threading.Event()
        #: Set when the thread has died and will not be started anew.
        self.ended = threading.Event()

    def start(self) -> None:
        """Start the thread and wait until every model is loaded.

        Raises:
            ModelLoadError, ConfigError: what the load raised.
            EngineDeadError: the engine's process ended.
        """
        self._loaded.clear()
        self._is_stopping = False
        thread = self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        thread.start()
        self.wait_until_loaded()
        if self._cause is not None:
            # The process would end with an abort if the thread were still giving back its streams.
            thread.join()
            raise self._cause

    def wait_until_loaded(self) -> None:
        """Block until the thread's models are loaded, or their load has failed."""
        self._loaded.wait()

    def stop(self) -> None:
        """End the thread after the step in flight and free the models."""
        self._is_stopping = True
        self._life.give_up_load()
        self._mailbox.stop_pacing()
        self._mailbox.tell(Stop())
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing more; let running requests finish for ``timeout_s``, then abort them."""
        self._draining = True
        if self.control.is_paused:
            # A dead engine ends nothing any more, nor does one that sleeps.
            with contextlib.suppress(EngineDeadError, InvalidRequestError):
                await self.control.resume()
        if self._is_busy and not self.control.is_paused:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        for request_id in self._streams.ids():
            self._mailbox.tell(Abort(request_id=request_id))
        self._streams.end_all(RequestAbortedError("The server is shutting down."))

    def models(self) -> Sequence[ServedModel]:
        """The loaded models that generate, in the order they were given."""
        return list({id(model): model for model in self._models.values()}.values())

    def first_model(self) -> ServedModel:
        """The first of them; raise InvalidRequestError if there is none."""
        models = self.models()
        if not models:
            raise InvalidRequestError("No model that generates is served here.", param="model")
        return models[0]

    def base_names(self) -> Sequence[tuple[str, ...]]:
        """The names of every model, those that generate first."""
        return [one.names for one in (*self.models(), *self.encoders.statuses())]

    def hold(self, model: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Have a model in memory while the block runs; one that generates is always there."""
        return contextlib.nullcontext() if model in self._models else self.encoders.hold(model)

    def get_model(self, name: str) -> ServedModel:
        """The model or adapter of this name.

        Raises:
            ModelNotFoundError: none has it.
            InvalidRequestError: it is an encoder.
        """
        model = self._models.get(name) or self.control.served(name)
        if model is not None:
            return model
        if self.encoders.find(name) is not None:
            raise InvalidRequestError(
                f"{name} is an encoder: it reads texts and generates none (docs/encoders.md).",
                param="model",
            )
        served = [one for names in self.base_names() for one in names]
        adapters = [one.name for one in self.control.adapters()]
        raise ModelNotFoundError(name, [*served, *adapters])

    async def check_room(self, model: str, client: str, n: int) -> None:
        """Refuse early what the queue has no room for; see ``EngineClient.check_room``."""
        self.check_health()
        served = self.get_model(model)
        limit = self._config.scheduler.max_waiting
        # No more wait than are open: mostly the engine, in another process perhaps, is not asked.
        if limit and self._streams.num_samples + n > limit:
            base = served.parent or served.names[0]
            await self._life.query(methodcaller("check_room", base, client, n))

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        """Admit a request; see ``EngineClient.submit``."""
        self.check_open()
        self.control.check_open()
        model = self.get_model(request.model)
        check_request(request, model.info)
        base = model.parent or model.names[0]
        if model.adapter is not None:
            await self.control.ensure_loaded(model.adapter, base)
            self.control.check_open()
        # Engines are known by their model's first name only.
        request = replace(request, model=base, adapter=model.adapter or request.adapter)
        stream = self._streams.open(request)
        self._idle.clear()
        try:
            refusal = await self._send(request)
            if isinstance(refusal, ModelNotFoundError) and model.adapter is not None:
                refusal = await self._send_with_adapter(request, model.adapter)
        except (asyncio.CancelledError, OSError):
            await self.abort(request.request_id)
            raise
        if refusal is not None:
            self._close(request.request_id)
            raise refusal
        return RequestHandle(request_id=request.request_id, events=stream, gather=stream.gather)

    async def abort(self, request_id: str) -> None:
        """End a request between two steps and free its blocks; unknown ids are ignored."""
        if self._close(request_id):
            self._mailbox.tell(Abort(request_id=request_id))

    async def cancel(self, request_id: str) -> None:
        """End a request between two steps and tell its reader; unknown ids are ignored."""
        if request_id in self._streams:
            self._mailbox.tell(Abort(request_id=request_id, is_told=True))

    async def call(self, action: Callable[[EngineHost], Any]) -> Any:
        """What an action between two steps gives; raise its error."""
        self.check_health()
        result = await self.ask(lambda reply: Call(action=action, reply=reply))
        if isinstance(result, ParallmError):
            raise result
        return result

    async def cancel_all(self) -> int:
        """End every request with what it has; how many there were."""
        request_ids = self._streams.ids()
        for request_id in request_ids:
            await self.cancel(request_id)
        return len(request_ids)

    async def wait_until_idle(self) -> None:
        """Return once no request is open."""
        await self._idle.wait()

    @property
    def config(self) -> EngineConfig:
        """The settings it was built from."""
        return self._config

    def open_requests(self) -> Sequence[GenerateRequest]:
        """The requests that were submitted and have not ended."""
        return self._streams.requests()

    async def load(self) -> EngineLoad:
        """How busy the engine is, over all models."""
        running, waiting = await self._query(methodcaller("num_running_and_waiting"), (0, 0))
        return EngineLoad(num_requests=len(self._streams), num_running=running, num_waiting=waiting)

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine thread is dead."""
        if self.died.is_set():
            raise EngineDeadError("The engine thread died.") from self._cause

    def check_open(self) -> None:
        """Raise ShuttingDownError or EngineDeadError if nothing is admitted any more."""
        self.check_health()
        if self._draining:
            raise ShuttingDownError("The server is shutting down.")

    async def memory(self) -> Mapping[str, ModelMemory]:
        """What each model takes, by its first name."""
        kept: Mapping[str, int] = {}
        return model_memory(
            self.models(),
            self.encoders.statuses(),
            await self._query(methodcaller("cache_bytes"), kept),
            self.control.adapters(),
        )

    async def render_metrics(self) -> tuple[bytes, str]:
        """The Prometheus exposition and its content type."""
        engines = await self._query(methodcaller("metrics"), MetricsText())
        self.control.report_memory(await self.memory())
        self.control.report(engines.slots)
        return engines.text + generate_latest(self._registry), CONTENT_TYPE_LATEST

    async def _query(self, ask: Callable[[EngineState], T], otherwise: T) -> T:
        """What the engines' state tells, or this where they are dead."""
        try:
            return await self._life.query(ask)
        except EngineDeadError:
            return otherwise

    async def _send(
        self, request: GenerateRequest, upload: AdapterUpload | None = None
    ) -> ParallmError | None:
        """Hand a request to the thread; its refusal, or None once it is admitted."""
        arrival_s = time.monotonic()
        return await self.ask(
            lambda reply: Submit(request=request, arrival_s=arrival_s, upload=upload, reply=reply)
        )

    async def _send_with_adapter(self, request: GenerateRequest, name: str) -> ParallmError | None:
        """``_send`` with the request's adapter, which had to make way since it was loaded."""
        try:
            upload = await self.control.read_named(name)
        except ParallmError as refusal:
            return refusal
        refusal = await self._send(request, upload)
        if refusal is None:
            await self.control.refresh()
        return refusal

    def tell(self, command: Command) -> None:
        """Send the thread a command that nobody waits for."""
        self._mailbox.tell(command)

    async def ask(self, command: Callable[[Callable[[Any], None]], Command]) -> Any:
        """What the thread replies to a command; EngineDeadError if it dies before that."""
        return await self._mailbox.ask(command)

    def _run(self) -> None:
        """The thread: load and serve, anew after a death where that is asked for."""
        while self._live() and not self._is_stopping:
            pass
        self._life.end()

    def _live(self) -> bool:
        """One life of the engines, from load to stop or death; whether to live again."""
        try:
            self._life.run(self._mailbox.inbox, self._deliver, self._on_loaded)
        except BaseException as cause:  # noqa: BLE001 - the thread's last act: tell every caller
            if self._on_death(cause):
                return True
            self.ended.set()
        return False

    def _on_loaded(self, loaded: Loaded) -> None:
        self.control.forget()
        self._models = {name: one for one in loaded.models for name in one.names}
        self.encoders.replace(loaded.encoders)
        self._cause = None
        self.died.clear()
        self._loaded.set()

    def _on_death(self, cause: BaseException) -> bool:
        """Record the cause and end every open request; whether to start anew."""
        self._cause = cause
        if not self._loaded.is_set():
            self._loaded.set()
            return False
        logger.critical("the engine thread died", exc_info=cause)
        self._loaded.clear()
        self.died.set()
        self._mailbox.clear()
        self._mailbox.post(self._fail_everything)
        return self._config.restart_on_failure

    def _deliver(self, events: list[GenerateEvent]) -> None:
        self._mailbox.deliver(self._dispatch, events)

    def _dispatch(self, events: list[GenerateEvent]) -> None:
        for request_id in self._streams.dispatch(events):
            self._mailbox.tell(Abort(request_id=request_id))
        self.note_open()

    def _close(self, request_id: str) -> bool:
        """Forget a stream; False if it was not open."""
        was_open = self._streams.close(request_id)
        self.note_open()
        return was_open

    @property
    def _is_busy(self) -> bool:
        return len(self._streams) + self.encoders.num_open > 0

    def note_open(self) -> None:
        """Something has been opened or closed: find out whether the engine is idle."""
        if self._is_busy:
            self._idle.clear()
        else:
            self._idle.set()

    def _fail_everything(self) -> None:
        error = EngineDeadError("The engine thread died.")
        error.__cause__ = self._cause
        self._streams.end_all(error)
        self.note_open()
        self._mailbox.fail(error)
