"""Requests of an HTTP process, over a pair of sockets, to engines behind a scripted runner."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_parallm.engine.catalogue import FoundModel
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.model_entry import ModelEntry
from mlx_parallm.engine.status import ModelState, ModelStatus
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.peers import requests
from mlx_parallm.peers.channel import Packed, pack
from mlx_parallm.peers.messages import Catalog, Events, Known, KnownModel, Reply, StartHttp
from mlx_parallm.peers.requests import Catalogs, HttpPeer
from mlx_parallm.peers.wire import Wire
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.remote_client import RemoteClient
from mlx_parallm.types.errors import (
    ControlError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ShuttingDownError,
)
from mlx_parallm.types.events import FinishReason, TokenEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fakes import FakeRunner, spell
from tests.scripted_engine import engine_of, make_request
from tests.scripted_process import builder
from tests.sum_kind import MAX_NUMBER, SumClient, SumRequest, sum_core


class Counted:
    """Implements ``Shared``."""

    number = 0

    def value(self) -> str:
        return f"change {self.number}"


class Pair:
    """An HTTP process and the process with the engines, on one event loop."""

    def __init__(self, engine: EngineCore, catalogs: Catalogs | None = None) -> None:
        self.core = engine
        start = StartHttp(engine.config, ServerConfig(), 64, "127.0.0.1", 2)
        self.shared = Counted()
        self.seen: list[Any] = []
        self.here = Wire(self._take_here, lambda: None)
        self.there = Wire(self._take_there, lambda: None)
        self.peer = HttpPeer(engine, self.there, catalogs or Catalogs(engine, self.shared))
        self.remote = RemoteClient(start, self.here, self.seen.append)

    def _take_here(self, message: Any, number: int) -> None:
        assert self.remote.take(message, number)

    def _take_there(self, message: Any, number: int) -> None:
        assert self.peer.take(message, number)

    async def connect(self) -> None:
        here, there = socket.socketpair()
        await self.here.connect(here)
        await self.there.connect(there)
        await self.peer.settle()


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = engine_of(builder(FakeRunner(spell("hello"))))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
async def pair(engine: AsyncEngine) -> AsyncIterator[Pair]:
    pair = Pair(engine)
    await pair.connect()
    yield pair
    pair.here.close()
    pair.there.close()


async def events_of(remote: RemoteClient, request: GenerateRequest) -> list[TokenEvent]:
    handle = await GENERATION.client(remote).submit(request)
    return [event async for event in handle.events if isinstance(event, TokenEvent)]


async def test_a_request_is_answered_as_where_the_engines_are(
    pair: Pair, engine: AsyncEngine
) -> None:
    local = await GENERATION.client(engine).submit(make_request("local"))
    expected = [event.text async for event in local.events if isinstance(event, TokenEvent)]
    requests = [make_request(f"r{number}") for number in range(5)]
    answers = await asyncio.gather(*(events_of(pair.remote, request) for request in requests))
    for events in answers:
        assert "".join(event.text for event in events) == "".join(expected)
    assert engine.open_requests() == []


async def test_the_models_are_those_of_the_engines(pair: Pair, engine: AsyncEngine) -> None:
    remote = GENERATION.client(pair.remote)
    (model,), (known,) = GENERATION.client(engine).models(), remote.models()
    assert (model.names, model.info) == (known.names, known.info)
    assert remote.first_model().names == remote.get_model(model.names[0]).names
    with pytest.raises(ModelNotFoundError, match=model.names[0]):
        GENERATION.client(pair.remote).get_model("nobody")
    with pytest.raises(ModelNotFoundError):
        await GENERATION.client(pair.remote).submit(replace(make_request("a"), model="nobody"))
    await GENERATION.client(pair.remote).check_room(model.names[0], "", 60)


async def test_refusals_come_back_and_leave_nothing(pair: Pair, engine: AsyncEngine) -> None:
    engine._draining = True
    with pytest.raises(ShuttingDownError):
        await GENERATION.client(pair.remote).submit(make_request("a"))
    engine._draining = False
    assert len(await events_of(pair.remote, make_request("a"))) > 0


async def test_an_abort_ends_the_request_where_the_engines_are(
    pair: Pair, engine: AsyncEngine
) -> None:
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(pair.remote).submit(make_request("a"))
    assert [each.request_id for each in engine.open_requests()] == ["a"]
    await pair.remote.abort(handle.request_id)
    await engine.wait_until_idle()
    cancelled = await GENERATION.client(pair.remote).submit(make_request("b"))
    await pair.remote.cancel("b")
    reasons = [
        event.finish_reason async for event in cancelled.events if isinstance(event, TokenEvent)
    ]
    assert reasons[-1] is FinishReason.ABORT


async def test_requests_of_a_process_that_is_gone_are_aborted(
    pair: Pair, engine: AsyncEngine
) -> None:
    await engine.control.pause(PauseMode.KEEP)
    for name in "abc":
        await GENERATION.client(pair.remote).submit(make_request(name))
    own = await GENERATION.client(engine).submit(make_request("own"))
    await pair.peer.leave()
    assert [each.request_id for each in engine.open_requests()] == ["own"]
    await engine.control.resume()
    assert "".join([e.text async for e in own.events if isinstance(e, TokenEvent)]) == "hello"
    await engine.wait_until_idle()
    await pair.peer.settle()


async def test_what_applications_share_is_known_before_the_next_answer(pair: Pair) -> None:
    assert pair.seen == ["change 0"]
    pair.shared.number = 1
    await events_of(pair.remote, make_request("a"))
    assert pair.seen == ["change 0", "change 1"]
    await pair.peer.settle()
    assert len(pair.seen) == 2


async def test_a_process_that_answers_too_late_or_never_can_leave(engine: AsyncEngine) -> None:
    pair = Pair(engine)
    for number, is_late in enumerate((True, False), 1):
        impatient = asyncio.create_task(pair.peer.settle())
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        if is_late:
            assert pair.peer.take(Known(), number)
    waiting = asyncio.create_task(pair.peer.settle())
    await asyncio.sleep(0)
    await pair.peer.leave()
    await waiting


async def test_kept_adapters_are_known_before_they_are_loaded(
    pair: Pair, engine: AsyncEngine, tmp_path: Path
) -> None:
    engine.control.announce = pair.peer.settle
    (base, *_) = GENERATION.client(engine).first_model().names
    await engine.control.keep("ft:1", base, tmp_path, loads=False)
    status = pair.remote.find("ft:1")
    assert status is not None
    assert status.parent == base
    await engine.control.forget_kept("ft:1")
    assert pair.remote.find("ft:1") is None


async def test_catalogs_are_pickled_once_for_all_processes(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[type] = []

    def noting(message: Any) -> Packed:
        packed.append(type(message))
        return pack(message)

    monkeypatch.setattr(requests, "pack", noting)
    shared = Counted()
    catalogs = Catalogs(engine, shared)
    pairs = [Pair(engine, catalogs) for _ in range(3)]
    for pair in pairs[:2]:
        await pair.connect()
    assert packed == [KnownModel, Catalog]
    shared.number = 1
    for pair in pairs[:2]:
        await pair.peer.settle()
    # One that is started later gets the models, too.
    await pairs[2].connect()
    assert packed == [KnownModel, Catalog, Catalog]
    for pair in pairs:
        assert len(await events_of(pair.remote, make_request(str(id(pair))))) > 0
        assert pair.seen[-1] == "change 1"
        pair.here.close()
        pair.there.close()


class Unreadable:
    """Cannot be made where it arrives."""

    def __reduce__(self) -> tuple[object, ...]:
        return __import__, ("no_such_module",)


async def test_what_cannot_be_read_or_sent_is_an_error_of_its_caller(
    pair: Pair, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the connection live on."""
    for question, why in ((Unreadable(), "no_such_module"), (lambda: None, "pickle")):
        with pytest.raises(ControlError, match=why):
            await pair.remote._ask(question)
        answer_later = pair.remote._ask_engine(cast(Any, question))
        with pytest.raises(ControlError, match=why):
            await asyncio.wrap_future(answer_later)

    async def answer(*_: object) -> Unreadable:
        return Unreadable()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "wait", answer)
        with pytest.raises(ControlError, match="no_such_module"):
            await pair.remote.wait("m")
    assert len(await events_of(pair.remote, make_request("a"))) > 0


async def test_a_reply_that_cannot_be_sent_is_an_error_of_its_caller(
    pair: Pair, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> object:
        return lambda: None

    with monkeypatch.context() as patch:
        patch.setattr(engine, "wait", answer)
        with pytest.raises(ControlError, match="pickle"):
            await pair.remote.wait("m")
    assert len(await events_of(pair.remote, make_request("a"))) > 0


async def test_events_that_cannot_be_read_end_the_connection(pair: Pair) -> None:
    lost = asyncio.Event()
    pair.here._on_lost = lost.set
    pair.there.send(Unreadable())
    await lost.wait()


@pytest.fixture
async def sums(tmp_path: Path) -> AsyncIterator[Pair]:
    core = sum_core(tmp_path / "sum", "a")
    core.start()
    pair = Pair(core)
    await pair.connect()
    yield pair
    pair.here.close()
    pair.there.close()
    core.stop()


async def test_a_request_of_one_event_is_one_message_each_way(
    sums: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[type] = []
    take = sums.remote.take
    monkeypatch.setattr(
        sums.remote,
        "take",
        lambda message, number: received.append(type(message)) or take(message, number),
    )
    client = SumClient(sums.remote)
    assert await client.add("x", "a", 1, 2) == 3
    assert received == [Events]
    assert not sums.remote._replies._pending
    assert await asyncio.gather(*(client.add(str(n), "a", n) for n in range(9))) == list(range(9))
    assert Reply not in received


async def test_a_refusal_is_the_event_of_such_a_request(sums: Pair) -> None:
    client = SumClient(sums.remote)
    with pytest.raises(OverloadedError, match="too much"):
        await client.add("x", "a", MAX_NUMBER + 1)
    with pytest.raises(InvalidRequestError, match="nothing to add"):
        await client.add("x", "a")
    sums.core._draining = True
    with pytest.raises(ShuttingDownError):
        await client.add("x", "a", 1)
    sums.core._draining = False
    assert await client.add("x", "a", 1, 2) == 3
    assert not sums.remote._replies._pending
    assert len(sums.remote._streams) == 0
    await sums.core.wait_until_idle()


async def test_such_a_request_that_cannot_be_sent_is_refused(sums: Pair) -> None:
    unsent: Any = SumRequest(request_id="x", model="a", numbers=(1, cast(Any, lambda: None)))
    reader = await sums.remote.open_reader(unsent)
    with pytest.raises(ControlError, match="pickle"):
        await reader.results()
    assert len(sums.remote._streams) == 0
    assert await SumClient(sums.remote).add("x", "a", 1) == 1


async def test_such_a_request_is_aborted_where_the_engines_are(sums: Pair) -> None:
    await sums.core.control.pause(PauseMode.KEEP)
    await sums.remote.open_reader(SumRequest(request_id="x", model="a", numbers=(1,)))
    await sums.remote.abort("x")
    assert not sums.remote._replies._pending
    await sums.remote.wait("a")
    await sums.core.wait_until_idle()
    assert await sums.core.control.pause(PauseMode.KEEP) == 0


async def test_a_flush_makes_no_status_while_no_model_moves(
    pair: Pair, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ModelEntry] = []
    status = ModelEntry.status

    def noting(entry: ModelEntry) -> ModelStatus:
        made.append(entry)
        return status(entry)

    models = {name: FoundModel(name, Path(name), 1) for name in map(str, range(100))}
    engine.directory.list_found(models)
    pair.peer.show()
    monkeypatch.setattr(ModelEntry, "status", noting)
    for _ in range(50):
        pair.peer.show()
    assert not made
    entry, _ = engine.directory.address("7")
    assert entry is not None
    entry.progress, entry.loading = 0.5, asyncio.get_running_loop().create_future()
    await pair.peer.settle()
    assert made
    known = pair.remote.find("7")
    assert known is not None
    assert (known.state, known.progress) == (ModelState.LOADING, 0.5)
