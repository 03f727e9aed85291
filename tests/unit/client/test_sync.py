"""The synchronous client has every method of the asynchronous one, and ends what it begins."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from mlx_parallm.client import (
    MezoClient,
    RLClient,
    ServerUnreachableError,
    SpeechClient,
    SyncMezoClient,
    SyncRLClient,
    SyncSpeechClient,
    SyncTrainingClient,
    TrainingClient,
)

PAIRS = [
    (RLClient, SyncRLClient),
    (MezoClient, SyncMezoClient),
    (TrainingClient, SyncTrainingClient),
    (SpeechClient, SyncSpeechClient),
]


@pytest.fixture(name="nowhere")
def address_that_refuses() -> Iterator[str]:
    """Yield the address of a port that is taken, and where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {name: function for name, function in functions if not name.startswith("_")}


@pytest.mark.parametrize(("asynchronous", "synchronous"), PAIRS)
def test_every_method_has_its_counterpart(asynchronous: type, synchronous: type) -> None:
    expected, actual = methods(asynchronous), methods(synchronous)
    assert set(expected) == set(actual)
    for name, method in expected.items():
        waits = actual[name]
        assert not inspect.iscoroutinefunction(waits)
        assert inspect.isgeneratorfunction(waits) == inspect.isasyncgenfunction(method), name
        assert inspect.signature(waits) == inspect.signature(method), name
        assert waits.__name__ == name
        assert waits.__doc__ == method.__doc__


def test_errors_are_those_of_the_client(nowhere: str) -> None:
    with SyncRLClient(nowhere) as client:
        with pytest.raises(ServerUnreachableError):
            client.rollout(["a"])
        with pytest.raises(ServerUnreachableError):
            list(client.stream_rollout(["a"]))
        with pytest.raises(ServerUnreachableError):
            client.mezo.sessions()


def test_a_closed_client_refuses_and_leaves_no_thread(nowhere: str) -> None:
    before = threading.active_count()
    client = SyncRLClient(nowhere)
    client.close()
    client.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        client.resume()
    with pytest.raises(RuntimeError, match="closed"):
        next(client.stream_rollout(["a"]))


async def test_it_works_beside_a_running_loop(nowhere: str) -> None:
    with SyncRLClient(nowhere) as client, pytest.raises(ServerUnreachableError):
        client.adapters()


class Held:
    """A transport whose streams yield one event and then wait; it notes when they are closed."""

    def __init__(self) -> None:
        self.is_waiting = threading.Event()
        self.num_closed = 0

    async def events(self, _path: str, _body: Any) -> Any:
        try:
            yield sample_event()
            self.is_waiting.set()
            await asyncio.Event().wait()
        finally:
            # A connection takes a while to close.
            await asyncio.sleep(0)
            self.num_closed += 1

    async def close(self) -> None:
        """Do nothing."""


def sample_event() -> dict[str, Any]:
    return {
        "type": "sample",
        "prompt_index": 0,
        "index": 0,
        "prompt": {"index": 0, "prompt_token_ids": [1]},
        "token_ids": [2],
        "logprobs": [-0.5],
        "text": "a",
        "finish_reason": "stop",
        "weight_versions": [],
    }


def held_client() -> tuple[SyncRLClient, Held]:
    client, held = SyncRLClient("http://127.0.0.1"), Held()
    client.client._transport = held  # type: ignore[assignment]
    return client, held


def test_leaving_a_stream_closes_it() -> None:
    client, held = held_client()
    with client:
        for sample in client.stream_rollout(["a"]):
            assert sample.text == "a"
            break
        assert held.num_closed == 1


def test_an_interrupt_ends_the_step_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    client, held = held_client()
    with client:
        samples = client.stream_rollout(["a"])
        next(samples)
        begin = asyncio.run_coroutine_threadsafe

        def interrupted(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
            future = begin(work, loop)
            held.is_waiting.wait()
            monkeypatch.setattr(future, "result", raise_interrupt)
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin)
            return future

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(samples)
        assert held.num_closed == 1


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_closing_ends_what_another_thread_waits_for() -> None:
    client, held = held_client()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            list(client.stream_rollout(["a"]))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    held.is_waiting.wait()
    client.close()
    thread.join()
    assert [type(error) for error in errors] == [CancelledError]
    assert held.num_closed == 1


def test_what_is_asked_for_while_the_loop_ends_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ask when the runner has cancelled all tasks, and runs the loop no more."""
    client, held = held_client()
    is_ending, is_asked = threading.Event(), threading.Event()
    end = asyncio.BaseEventLoop.shutdown_default_executor

    def hold_up(loop: asyncio.AbstractEventLoop, *args: Any) -> Any:
        is_ending.set()
        is_asked.wait()
        return end(loop, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.BaseEventLoop, "shutdown_default_executor", hold_up)
    begin = asyncio.run_coroutine_threadsafe

    def ask(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        future = begin(work, loop)
        if is_ending.is_set():
            is_asked.set()
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", ask)
    errors: list[BaseException] = []

    def read() -> None:
        is_ending.wait()
        try:
            client.rollout(["a"])
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    client.close()
    thread.join()
    assert [type(error) for error in errors] == [CancelledError]
    del held
