"""The client for programs without an event loop: it runs ``RLClient`` on a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from mlx_parallm.client.mezo import MezoClient, TrainingClient
from mlx_parallm.client.nets import NetsClient
from mlx_parallm.client.rl import RLClient
from mlx_parallm.client.speech import SpeechClient

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


class _LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        self._stopped = asyncio.Event()
        self._waiting: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._turn, args=(runner,), name="mlx_parallm client", daemon=True
        )
        self._thread.start()

    def _turn(self, runner: asyncio.Runner) -> None:
        # The runner cancels what other threads still wait for, so that none waits for ever.
        with runner:
            runner.run(self._stopped.wait())
        # What they asked for after that does not end, because the loop runs no more.
        with self._lock:
            waiting = [
                (future, work) for future, work in self._waiting.items() if not future.done()
            ]
        for future, work in waiting:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            future.set_exception(CancelledError())

    @property
    def is_closed(self) -> bool:
        """True after ``close``."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns; raise RuntimeError if the loop is closed."""
        with self._lock:
            if self.is_closed:
                work.close()
                raise RuntimeError("This client is closed.")
            try:
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:
                # It was closed meanwhile.
                work.close()
                raise RuntimeError("This client is closed.") from None
            self._waiting[future] = work
        try:
            return future.result()
        except BaseException:
            # An interrupt of the caller ends the request too.
            future.cancel()
            raise
        finally:
            with self._lock:
                del self._waiting[future]

    def close(self) -> None:
        """End the thread."""
        if not self.is_closed:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()


class _Blocking(Generic[C]):
    """An asynchronous client, and the thread that it runs on."""

    def __init__(self, client: C, thread: _LoopThread) -> None:
        self.client = client
        self.thread = thread


def _blocking(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Blocking[C], P], T]:
    """Return a method that waits for the result of an asynchronous one."""

    @functools.wraps(method)
    def call(self: _Blocking[C], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.run(method(self.client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[C, P], AsyncIterator[T]],
) -> Callable[Concatenate[_Blocking[C], P], Generator[T]]:
    """Return a generator of what an asynchronous one yields; closing it closes that one."""

    @functools.wraps(method)
    def call(self: _Blocking[C], *args: P.args, **kwargs: P.kwargs) -> Generator[T]:
        stream = _Stream(method(self.client, *args, **kwargs))
        try:
            while (items := self.thread.run(stream.take())) is not None:
                yield items[0]
        finally:
            if not self.thread.is_closed:
                self.thread.run(stream.close())

    return call


class _Stream(Generic[T]):
    """An asynchronous generator. The lock lets an interrupted step end before it is closed."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items = items
        self._lock = asyncio.Lock()

    async def take(self) -> tuple[T] | None:
        """Return the next item; None at the end."""
        async with self._lock:
            async for item in self._items:
                return (item,)
        return None

    async def close(self) -> None:
        """Close the generator."""
        async with self._lock:
            close: Callable[[], Coroutine[Any, Any, None]] = getattr(self._items, "aclose")  # noqa: B009
            await close()


class SyncMezoClient(_Blocking[MezoClient]):
    """The training sessions of a server: ``SyncRLClient.mezo``, with ``MezoClient``'s methods."""

    create = _blocking(MezoClient.create)
    sessions = _blocking(MezoClient.sessions)
    get = _blocking(MezoClient.get)
    delete = _blocking(MezoClient.delete)
    step = _blocking(MezoClient.step)
    train_step = _blocking(MezoClient.train_step)
    ask = _blocking(MezoClient.ask)
    tell = _blocking(MezoClient.tell)
    run = _blocking(MezoClient.run)
    events = _iterating(MezoClient.events)
    pause = _blocking(MezoClient.pause)
    resume = _blocking(MezoClient.resume)
    evaluate = _blocking(MezoClient.evaluate)
    checkpoint = _blocking(MezoClient.checkpoint)
    log = _blocking(MezoClient.log)
    publish = _blocking(MezoClient.publish)
    adapter = _blocking(MezoClient.adapter)
    save_adapter = _blocking(MezoClient.save_adapter)


class SyncTrainingClient(_Blocking[TrainingClient]):
    """The sessions that take gradients: ``SyncRLClient.training``, with its methods."""

    create = _blocking(TrainingClient.create)
    sessions = _blocking(TrainingClient.sessions)
    get = _blocking(TrainingClient.get)
    delete = _blocking(TrainingClient.delete)
    step = _blocking(TrainingClient.step)
    train_step = _blocking(TrainingClient.train_step)
    run = _blocking(TrainingClient.run)
    events = _iterating(TrainingClient.events)
    pause = _blocking(TrainingClient.pause)
    resume = _blocking(TrainingClient.resume)
    evaluate = _blocking(TrainingClient.evaluate)
    checkpoint = _blocking(TrainingClient.checkpoint)
    publish = _blocking(TrainingClient.publish)
    adapter = _blocking(TrainingClient.adapter)
    save_adapter = _blocking(TrainingClient.save_adapter)


class SyncNetsClient(_Blocking[NetsClient]):
    """The nets of a server: ``SyncRLClient.nets``, with ``NetsClient``'s methods."""

    act = _blocking(NetsClient.act)
    predict = _blocking(NetsClient.predict)


class SyncSpeechClient(_Blocking[SpeechClient]):
    """The speech models of a server: ``SyncRLClient.speech``, with ``SpeechClient``'s methods."""

    transcribe = _blocking(SpeechClient.transcribe)
    translate = _blocking(SpeechClient.translate)
    stream_transcript = _iterating(SpeechClient.stream_transcript)


class SyncRLClient(_Blocking[RLClient]):
    """``RLClient`` for programs without an event loop, such as scripts and notebooks.

    It has the same methods. They wait for the answer; ``stream_rollout`` and ``events`` are
    generators, and leaving one early ends what it still waits for. It may be used on any thread.

    Example:
        >>> with SyncRLClient("http://127.0.0.1:8000") as client:
        ...     rollout = client.rollout(["1, 2, 3,"], n=4, max_tokens=8)
        ...     print(rollout.samples[0].token_ids, rollout.samples[0].logprobs)

    Attributes:
        mezo: the server's training sessions that learn by forward passes.
        training: those that take gradients.
        nets: the server's nets and policies.
        speech: its speech models.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Create a client, without sending anything; see ``RLClient`` for the arguments."""
        client = RLClient(base_url, api_key=api_key, timeout_s=timeout_s)
        super().__init__(client, _LoopThread())
        self.mezo = SyncMezoClient(client.mezo, self.thread)
        self.training = SyncTrainingClient(client.training, self.thread)
        self.nets = SyncNetsClient(client.nets, self.thread)
        self.speech = SyncSpeechClient(client.speech, self.thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the server aborts rollouts that still run."""
        if not self.thread.is_closed:
            self.thread.run(self.client.close())
            self.thread.close()

    wait_until_ready = _blocking(RLClient.wait_until_ready)
    rollout = _blocking(RLClient.rollout)
    stream_rollout = _iterating(RLClient.stream_rollout)
    logprobs = _blocking(RLClient.logprobs)
    rewards = _blocking(RLClient.rewards)
    load_adapter = _blocking(RLClient.load_adapter)
    update_adapter = _blocking(RLClient.update_adapter)
    adapters = _blocking(RLClient.adapters)
    unload_adapter = _blocking(RLClient.unload_adapter)
    pause = _blocking(RLClient.pause)
    resume = _blocking(RLClient.resume)
    is_paused = _blocking(RLClient.is_paused)
    sleep = _blocking(RLClient.sleep)
    wake_up = _blocking(RLClient.wake_up)
    update_weights = _blocking(RLClient.update_weights)
    weight_version = _blocking(RLClient.weight_version)
