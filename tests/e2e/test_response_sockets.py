"""/v1/responses over WebSockets: turns by OpenAI's client, handshakes, frames, and their bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from mlx_parallm.api.responses import socket as sockets
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import OverloadedError, StepError
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, fail, hang, serve_fake, write
from tests.response_events import check_events

KEY = "one"
LAST = ("response.completed", "response.failed", "response.incomplete", "error")
OFFER = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==",
}
TEXT, BINARY, CLOSE, PING, PONG, REST = 1, 2, 8, 9, 10, 0
FIN = 0x80


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serve_fake(engine, ServerConfig(api_keys=(KEY, "two"), max_body_bytes=65_536)) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    engine = served[0]
    engine.reset()
    return engine


@pytest.fixture
def url(served: tuple[FakeEngine, str], engine: FakeEngine) -> str:
    return served[1]


@contextlib.contextmanager
def opened(url: str, key: str | None = KEY) -> Iterator[ClientConnection]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = url.replace("http", "ws") + "/v1/responses"
    with connect(address, additional_headers=headers, compression=None) as connection:
        yield connection


def events(connection: ClientConnection) -> list[dict[str, Any]]:
    """Return the events up to the end of a turn."""
    received: list[dict[str, Any]] = []
    while not received or received[-1]["type"] not in LAST:
        received.append(json.loads(connection.recv()))
    return received


def turn(connection: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    body = {"type": "response.create", "model": "alias", "input": "hi", "store": False}
    connection.send(json.dumps(body | fields))
    return events(connection)


def error_of(connection: ClientConnection, **fields: Any) -> dict[str, Any]:
    """Return the error of a turn, with its status."""
    (event,) = turn(connection, **fields)
    assert event["type"] == "error"
    assert event["error"].keys() >= {"type", "code", "message", "param"}
    assert isinstance(event["error"]["code"], str)
    return event["error"] | {"status": event["status"]}


# OpenAI's client opens connections in a way that the library under it deprecates.
@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")
def test_openais_client_takes_turns(engine: FakeEngine, url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client,
        client.responses.connect() as connection,
    ):
        connection.response.create(model="alias", input="hi")
        received = [event.to_dict(mode="json") for event in _until_end(connection)]
        first = check_events(received)
        assert first["output"][0]["content"][0]["text"] == "hello"
        connection.response.create(
            model="alias", input="more", previous_response_id=first["id"], store=False
        )
        second = check_events(event.to_dict(mode="json") for event in _until_end(connection))
        assert (second["previous_response_id"], second["store"]) == (first["id"], False)
        assert client.responses.retrieve(first["id"]).output_text == "hello"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second["id"])
    prompts = [bytes(engine.submitted.get().prompt_ids).decode() for _ in range(2)]
    assert prompts[1] == f"{prompts[0]}assistant: hello\nuser: more\n"


def _until_end(connection: Any) -> Iterator[Any]:
    for event in connection:
        yield event
        if event.type in LAST:
            return


def test_what_is_not_stored_goes_on_in_its_connection_alone(url: str) -> None:
    with opened(url) as connection, opened(url) as other:
        first = turn(connection)[-1]["response"]["id"]
        gone = error_of(other, previous_response_id=first)
        assert (gone["status"], gone["code"]) == (404, "previous_response_not_found")
        assert gone["param"] == "previous_response_id"
        second = turn(connection, previous_response_id=first)[-1]["response"]["id"]
        # Only the latest response is remembered.
        assert error_of(connection, previous_response_id=first)["code"] == gone["code"]
        assert turn(connection, previous_response_id=second)[-1]["type"] == "response.completed"


def test_a_turn_that_fails_is_forgotten_with_what_it_went_on_with(
    engine: FakeEngine, url: str
) -> None:
    orphan = [{"type": "function_call_output", "call_id": "c", "output": "x"}]
    with opened(url) as connection:
        for script, fields, end in (
            (write("hello"), {"input": orphan}, "error"),
            (fail(StepError("no"), after="he"), {}, "response.failed"),
        ):
            engine.script = write("hello")
            before = turn(connection)[-1]["response"]["id"]
            engine.script = script
            failed = turn(connection, previous_response_id=before, **fields)
            assert [event["type"] for event in failed if event["type"] in LAST] == [end]
            engine.script = write("hello")
            retried = error_of(connection, previous_response_id=before)
            assert retried["code"] == "previous_response_not_found"


def test_a_stored_response_goes_on_elsewhere(url: str) -> None:
    with opened(url) as connection:
        first = turn(connection, store=True)[-1]["response"]["id"]
    with opened(url) as connection:
        assert turn(connection, previous_response_id=first)[-1]["type"] == "response.completed"
    with opened(url, "two") as connection:
        code = error_of(connection, previous_response_id=first)["code"]
        assert code == "previous_response_not_found"


def test_nothing_is_generated_to_warm_up(engine: FakeEngine, url: str) -> None:
    with opened(url) as connection:
        received = turn(connection, input="long", generate=False)
        kinds = [event["type"] for event in received]
        assert kinds == ["response.created", "response.in_progress", "response.completed"]
        warm = received[-1]["response"]
        assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
        assert engine.submitted.empty()
        turn(connection, input="short", previous_response_id=warm["id"])
    assert bytes(engine.submitted.get().prompt_ids) == b"user: long\nuser: short\n"


def test_messages_are_answered_one_after_the_other(engine: FakeEngine, url: str) -> None:
    body = {"type": "response.create", "model": "alias", "store": False}
    with opened(url) as connection:
        for number in range(8):
            connection.send(
                json.dumps(body | {"input": str(number), "metadata": {"n": str(number)}})
            )
        for number in range(8):
            last = check_events(events(connection))
            assert last["metadata"] == {"n": str(number)}


def test_errors_of_the_engine_have_their_status(engine: FakeEngine, url: str) -> None:
    engine.refusal = OverloadedError("Full.", retry_after_s=7)
    with opened(url) as connection:
        error = error_of(connection)
    assert (error["status"], error["code"]) == (429, "rate_limit_exceeded")
    assert error["headers"]["retry-after"] == "7"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("{", None, "invalid_json"),
        ("[1]", None, "invalid_request_error"),
        (b"{}", None, "invalid_message"),
        ("{}", "type", "unsupported_event"),
        ('{"type": "response.steer"}', "type", "unsupported_event"),
        ('{"type": "response.create", "model": "x", "input": "x"}', "model", "model_not_found"),
        ('{"type": "response.create", "input": []}', "input", "invalid_request_error"),
        ('{"type": "response.create", "input": "x", "background": true}', "background",
         "invalid_request_error"),
        ('{"type": "response.create", "input": "x", "stream_id": "a"}', "stream_id",
         "unsupported_parameter"),
        ('{"type": "response.create", "include": ["x"]}', "include", "invalid_request_error"),
    ],
)  # fmt: skip
def test_a_bad_message_is_an_error_and_the_next_is_answered(
    url: str, message: str | bytes, param: str | None, code: str
) -> None:
    with opened(url) as connection:
        connection.send(message)
        (event,) = events(connection)
        assert 400 <= event["status"] < 500
        assert (event["error"]["param"], event["error"]["code"]) == (param, code)
        assert turn(connection)[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"origin": "https://other.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"upgrade": "h2c"}, 426),
        ({"connection": "keep-alive"}, 426),
        ({"sec-websocket-version": "8"}, 426),
        ({"sec-websocket-key": "eA=="}, 400),
        ({"sec-websocket-key": "?"}, 400),
    ],
)
def test_a_handshake_is_checked_as_a_request(
    url: str, changes: dict[str, str], status: int
) -> None:
    headers = OFFER | {"authorization": f"Bearer {KEY}"} | changes
    response = httpx2.get(f"{url}/v1/responses", headers=headers)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
    assert (response.headers.get("upgrade") == "websocket") == (status == 426)


def test_a_handshake_names_a_host_of_this_server() -> None:
    with serve_fake(FakeEngine(), bound_to="127.0.0.1") as url:
        headers = OFFER | {"host": "evil.example"}
        assert httpx2.get(f"{url}/v1/responses", headers=headers).status_code == 421
        with opened(url, None) as connection:
            assert turn(connection)[-1]["type"] == "response.completed"
        page = {"origin": url}
        address = url.replace("http", "ws") + "/responses"
        with connect(address, additional_headers=page, compression=None) as connection:
            assert turn(connection)[-1]["type"] == "response.completed"


def test_each_client_has_so_many_connections(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_SOCKETS", 4)
    config = ServerConfig(api_keys=(KEY, "two"))
    with serve_fake(FakeEngine(), config) as own, opened(own) as first, opened(own) as second:
        turn(first)
        turn(second)
        with pytest.raises(InvalidStatus, match="429"), opened(own):
            pass
        with opened(own, "two") as other:
            assert turn(other)[-1]["type"] == "response.completed"


def test_an_old_connection_is_closed(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(sockets, "MAX_AGE_S", 0)
    with opened(url) as connection:
        (event,) = events(connection)
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            connection.recv()


def test_a_client_that_leaves_ends_its_response(engine: FakeEngine, url: str) -> None:
    engine.script = hang(after="he")
    with opened(url) as connection:
        connection.send(json.dumps({"type": "response.create", "model": "alias", "input": "x"}))
        submitted = engine.submitted.get()
    assert engine.aborted.get() == submitted.request_id


def test_requests_are_counted_by_their_messages(url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}

    def count(method: str, status: int) -> float:
        name = f'http_requests_total{{handler="/v1/responses",method="{method}",status="{status}"}}'
        lines = httpx2.get(f"{url}/metrics", headers=headers).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = count("GET", 101), count("POST", 200), count("POST", 404)
    with opened(url) as connection:
        turn(connection)
        turn(connection)
        error_of(connection, model="none")
    after = count("GET", 101), count("POST", 200), count("POST", 404)
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 2, 1]


class Raw:
    """A client that writes frames by hand."""

    def __init__(self, url: str, key: str = KEY) -> None:
        address = urlsplit(url)
        assert address.hostname
        self.socket = socket.create_connection((address.hostname, address.port))
        head = OFFER | {"host": "127.0.0.1", "authorization": f"Bearer {key}"}
        lines = [
            "GET /v1/responses HTTP/1.1",
            *(f"{name}: {value}" for name, value in head.items()),
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self._file = self.socket.makefile("rb")
        assert b"101" in self._file.readline()
        while self._file.readline() != b"\r\n":
            pass

    def send(self, opcode: int, data: bytes = b"", *, size: int | None = None) -> None:
        """Send a frame, or the beginning of one of ``size`` bytes."""
        self.socket.sendall(frame(opcode, data, size=size))

    def read(self) -> tuple[int, bytes]:
        """Return the opcode and the data of the next frame; 0 at the end of the connection."""
        head = self._file.read(2)
        if len(head) < 2:
            return 0, b""
        length = head[1]
        if length == 126:
            (length,) = struct.unpack("!H", self._file.read(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", self._file.read(8))
        return head[0] & 0x0F, self._file.read(length)

    def close_code(self) -> int:
        """Return the code that the server closes the connection with, and see it end."""
        opcode, data = self.read()
        while opcode not in (CLOSE, 0):
            opcode, data = self.read()
        assert opcode == CLOSE
        assert self.read() == (0, b"")
        return int.from_bytes(data[:2])

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@contextlib.contextmanager
def raw(url: str, key: str = KEY) -> Iterator[Raw]:
    client = Raw(url, key)
    try:
        yield client
    finally:
        client.close()


def frame(opcode: int, data: bytes = b"", *, size: int | None = None) -> bytes:
    """Return a masked frame; its mask of zeros leaves the data as they are."""
    size = len(data) if size is None else size
    length = bytes([0x80 | size]) if size < 126 else b"\xff" + struct.pack("!Q", size)
    return bytes([opcode]) + length + b"\0" * 4 + data


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(FIN | TEXT, b"x", size=100_000_000), 1009),
        (frame(TEXT, b"x" * 60_000) + frame(FIN | REST, b"x" * 60_000), 1009),
        (frame(FIN | TEXT, b"\xff"), 1007),
        (frame(FIN | REST, b"x"), 1002),
        (frame(TEXT, b"x") + frame(FIN | TEXT, b"x"), 1002),
        (frame(FIN | 3, b"x"), 1002),
        (frame(FIN | PING, b"x" * 126), 1002),
        (bytes([FIN | TEXT, 1]) + b"x", 1002),
        (bytes([FIN | 0x40 | TEXT, 0x80]) + b"\0" * 4, 1002),
        (frame(TEXT) + frame(REST) * 20_000, 1008),
        (frame(FIN | PING) * 20_000, 1008),
    ],
    ids=["100 MB", "fragments", "bytes", "no beginning", "no end", "opcode", "long ping",
         "unmasked", "compressed", "empty fragments", "pings"],
)  # fmt: skip
def test_a_bad_frame_ends_the_connection(url: str, data: bytes, code: int) -> None:
    with raw(url) as client:
        with contextlib.suppress(ConnectionError):
            client.socket.sendall(data)
        assert client.close_code() == code


def test_a_message_may_come_in_pieces_with_pings_between(url: str) -> None:
    body = json.dumps({"type": "response.create", "model": "alias", "input": "hi"}).encode()
    with raw(url) as client:
        client.send(TEXT, body[:20])
        client.send(FIN | PING, b"there?")
        assert client.read() == (PONG, b"there?")
        client.send(REST, body[20:30])
        client.send(FIN | REST, body[30:])
        opcode, data = client.read()
        assert (opcode, json.loads(data)["type"]) == (TEXT, "response.created")
        client.send(FIN | CLOSE, struct.pack("!H", 1000))
        assert client.close_code() == 1000


def test_what_is_unread_counts_for_its_key() -> None:
    config = ServerConfig(api_keys=(KEY, "two"), max_client_body_bytes=100_000)
    part = b"x" * 80_000
    with (
        serve_fake(FakeEngine(), config) as url,
        raw(url) as first,
        raw(url) as second,
        raw(url, "two") as other,
    ):
        for client in (first, other):
            client.send(TEXT, part)
            client.send(FIN | PING)
            assert client.read()[0] == PONG, "the part was read"
        second.send(TEXT, part)
        assert second.close_code() == 1013


def test_a_server_that_stops_says_so() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.ExitStack())
        url = server.enter_context(serve_fake(FakeEngine(), ServerConfig(api_keys=(KEY,))))
        idle = stack.enter_context(opened(url))
        turn(idle)
        server.close()
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012


def test_a_server_that_stops_finishes_the_response() -> None:
    own, may_end = FakeEngine(), threading.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        await asyncio.to_thread(may_end.wait)
        async for event in write("hello")(request):
            yield event

    own.script = script
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.ExitStack())
        url = server.enter_context(serve_fake(own, ServerConfig(api_keys=(KEY,))))
        connection = stack.enter_context(opened(url))
        body = {"type": "response.create", "model": "alias", "input": "x"}
        connection.send(json.dumps(body))
        own.submitted.get()
        stopping = threading.Thread(target=server.close)
        stopping.start()
        may_end.set()
        assert events(connection)[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
        stopping.join()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
