"""Connections that go from process to process."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.api.http.connection import MAX_HEAD_BYTES
from mlx_parallm.api.http.handover import request_line
from mlx_parallm.cli.api_servers.connections import ConnectionServer
from mlx_parallm.peers import connections as connections_module
from mlx_parallm.peers.channel import SpareDescriptor, pack
from mlx_parallm.peers.connections import LATER, TAKEN, ConnectionPipe
from mlx_parallm.server_config import ServerConfig
from tests.descriptors import no_descriptor_allowed, no_descriptor_left


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: a", ("GET", "/v1/models")),
        (b"\r\n\r\nPOST /a?b=/c HTTP/1.1\r\n", ("POST", "/a")),
        (b"GET http://host:80/a/b?c HTTP/1.1\r\n", ("GET", "/a/b")),
        (b"GET /a%2Fb HTTP/1.1\n", ("GET", "/a/b")),
        (b"OPTIONS * HTTP/1.1\r\n", ("OPTIONS", "*")),
        (b"GET http://[a/ HTTP/1.1\r\n", ("GET", "")),
        (b"\x16\x03\x01\n", ("\x16\x03\x01", "")),
        (b"GET /v1/models HTTP/1.1", None),
        (b"\r\n", None),
        (b"", None),
    ],
)
def test_a_request_line_is_read(head: bytes, expected: tuple[str, str] | None) -> None:
    assert request_line(head) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_a_line_or_not_one_yet(head: bytes) -> None:
    line = request_line(head)
    assert (line is None) == (b"\n" not in head.lstrip(b"\r\n"))


def test_a_line_that_never_ends_is_none() -> None:
    assert request_line(b"GET /" + b"a" * MAX_HEAD_BYTES + b"\n") is None


@pytest.fixture
def connections() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    pairs = [socket.socketpair() for _ in range(40)]
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


Taken = asyncio.Queue[tuple[socket.socket, bytes]]


def receiving(end: socket.socket, taken: Taken, **options: Any) -> ConnectionPipe:
    """Return a pipe whose connections are put into a queue; its other end stays open."""
    return ConnectionPipe(
        end,
        lambda *arrived: taken.put_nowait(arrived),
        lambda: pytest.fail("the pipe is there"),
        **options,
    )


@pytest.mark.parametrize("keeps_copies", [False, True])
async def test_connections_arrive_in_order_with_what_was_read(
    connections: list[tuple[socket.socket, socket.socket]], keeps_copies: bool
) -> None:
    here, there = socket.socketpair()
    # Small buffers cut sizes, descriptors and bytes into parts.
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    taken: list[tuple[socket.socket, bytes]] = []
    done = asyncio.Event()

    def take(connection: socket.socket, head: bytes) -> None:
        taken.append((connection, head))
        if len(taken) == len(connections):
            done.set()

    lost = asyncio.Event()
    sender = ConnectionPipe(here, take, lost.set, keeps_copies=keeps_copies)
    receiver = ConnectionPipe(
        there, take, lambda: pytest.fail("it was closed here"), keeps_copies=keeps_copies
    )
    heads = [bytes([number]) * (number * number * 331) for number in range(len(connections))]
    for (mine, _), head in zip(connections, heads, strict=True):
        sender.send(mine.dup(), head)
    await done.wait()
    assert [head for _, head in taken] == heads
    for number, (connection, _) in enumerate(taken):
        connection.sendall(b"%d" % number)
        assert connections[number][1].recv(9) == b"%d" % number
        connection.close()
    receiver.close()
    await lost.wait()


def frame(head: bytes | None) -> bytes:
    """Return what comes with a descriptor."""
    return b"".join(pack(head).parts(0))


async def closed(connection: socket.socket) -> None:
    """Return once a pipe has closed a connection."""
    while connection.fileno() != -1:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n"])
async def test_a_client_sees_the_end_of_what_the_other_process_closed(
    connections: list[tuple[socket.socket, socket.socket]], head: bytes
) -> None:
    """Close it there while this loop does nothing: a copy here would hold it open."""
    here, there = socket.socketpair()
    sender = ConnectionPipe(here, lambda *_: None, lambda: None, keeps_copies=False)
    with there:
        mine, client = connections[0]
        sender.send(mine, head)
        _, descriptors, _, _ = socket.recv_fds(there, len(frame(head)), 1)
        socket.socket(fileno=descriptors[0]).close()
        client.setblocking(False)
        assert client.recv(1) == b""
        sender.close()


async def test_a_process_that_reads_nothing_costs_the_sender_no_descriptors(
    connections: list[tuple[socket.socket, socket.socket]],
) -> None:
    here, there = socket.socketpair()
    sender = ConnectionPipe(
        here, lambda *_: None, lambda: pytest.fail("the pipe is there"), keeps_copies=False
    )
    with there:
        for mine, _ in connections:
            sender.send(mine, b"")
        assert [mine.fileno() for mine, _ in connections] == [-1] * len(connections)
        sender.close()


async def test_without_copies_nothing_is_acknowledged(
    connections: list[tuple[socket.socket, socket.socket]],
) -> None:
    here, there = socket.socketpair()
    taken = Taken()
    receiver = receiving(
        there,
        taken,
        keeps_copies=False,
    )
    with here:
        socket.send_fds(here, [frame(b"")], [connections[0][0].fileno()])
        connection, _ = await taken.get()
        connection.close()
        receiver.close()
        assert here.recv(4) == b""


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n"])
async def test_a_descriptor_stays_open_until_the_other_end_has_it(
    connections: list[tuple[socket.socket, socket.socket]], head: bytes
) -> None:
    """Keep what is only on its way: XNU may collect a descriptor that no process has."""
    here, there = socket.socketpair()
    with there:
        sender = ConnectionPipe(here, lambda *_: None, lambda: None, keeps_copies=True)
        sent = [mine for mine, _ in connections[:3]]
        for connection in sent:
            sender.send(connection, head)
        for number, connection in enumerate(sent):
            data, descriptors, _, _ = socket.recv_fds(there, len(frame(head)), 1)
            assert data == frame(head)
            assert connection.fileno() != -1
            there.sendall(frame(TAKEN))
            await closed(connection)
            assert all(later.fileno() != -1 for later in sent[number + 1 :])
            with socket.socket(fileno=descriptors[0]) as arrived:
                arrived.sendall(b"here")
            assert connections[number][1].recv(9) == b"here"
        sender.close()


async def test_what_no_process_acknowledged_is_closed_with_the_pipe(
    connections: list[tuple[socket.socket, socket.socket]],
) -> None:
    here, there = socket.socketpair()
    lost = asyncio.Event()
    pipe = ConnectionPipe(here, lambda *_: None, lost.set, keeps_copies=True)
    pipe.send(connections[0][0], b"")
    there.close()
    await lost.wait()
    assert connections[0][0].fileno() == -1
    assert connections[0][1].recv(1) == b""


async def test_what_was_not_sent_is_closed_with_the_pipe(
    connections: list[tuple[socket.socket, socket.socket]],
) -> None:
    here, there = socket.socketpair()
    with there:
        pipe = ConnectionPipe(here, lambda *_: None, lambda: None)
        (mine, other), (late, other_of_late) = connections[:2]
        pipe.send(mine, b"x" * 10_000_000)
        pipe.send(late, b"")
        pipe.close()
        pipe.send(connections[2][0], b"")
    assert other_of_late.recv(1) == connections[2][1].recv(1) == b""
    # The first one went with the first bytes, to a process that has ended since.
    assert other.recv(1) == b""


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n"])
async def test_connections_wait_while_no_descriptor_is_left(
    connections: list[tuple[socket.socket, socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
    head: bytes,
) -> None:
    monkeypatch.setattr(connections_module, "RETRY_S", 0.001)
    tries: list[None] = []
    hold = SpareDescriptor.hold
    monkeypatch.setattr(SpareDescriptor, "hold", lambda spare: tries.append(None) or hold(spare))
    here, there = socket.socketpair()
    taken = Taken()
    sender = ConnectionPipe(here, lambda *_: None, lambda: None, keeps_copies=False)
    receiver = receiving(
        there,
        taken,
        on_dropped=lambda: taken.put_nowait((here, b"dropped")),
        keeps_copies=False,
    )
    for mine, _ in connections:
        sender.send(mine, head)
    with no_descriptor_left():
        # It takes the place of the spare descriptor.
        arrived = [await taken.get()]
        assert arrived[0][1] == head
        tries.clear()
        while len(tries) < 3:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        assert taken.empty()
    for _, other in connections:
        connection, read = arrived.pop() if arrived else await taken.get()
        connection.sendall(b"here")
        assert (other.recv(9), read) == (b"here", head)
        connection.close()
    receiver.close()
    sender.close()


@pytest.mark.parametrize("has_spare", [False, True])
async def test_copies_are_closed_while_no_descriptor_is_left(
    connections: list[tuple[socket.socket, socket.socket]], has_spare: bool
) -> None:
    """Read what frees them, even if another thread took the place of the spare descriptor."""
    here, there = socket.socketpair()
    with there:
        sender = ConnectionPipe(here, lambda *_: None, lambda: None, keeps_copies=True)
        sent = [mine for mine, _ in connections[:3]]
        for connection in sent:
            sender.send(connection, b"")
        if not has_spare:
            sender._spare.close()
        with no_descriptor_left():
            for connection in sent:
                there.sendall(frame(TAKEN))
                await closed(connection)
        sender.close()


async def test_a_head_is_read_whole_when_it_took_the_last_descriptor(
    connections: list[tuple[socket.socket, socket.socket]],
) -> None:
    here, there = socket.socketpair()
    taken = Taken()
    receiver = ConnectionPipe(there, lambda *arrived: taken.put_nowait(arrived), lambda: None)
    data = frame(b"GET / HTTP/1.1\r\n")
    with here, no_descriptor_left():
        socket.send_fds(here, [data[:20]], [connections[0][0].fileno()])
        while receiver._incoming.is_in_head:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0)
        here.sendall(data[20:])
        connection, head = await taken.get()
        assert head == b"GET / HTTP/1.1\r\n"
    connection.close()
    receiver.close()


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n", b"x" * 300_000])
@pytest.mark.parametrize("keeps_copies", [False, True])
async def test_a_connection_whose_place_is_taken_is_dropped_and_those_after_it_arrive(
    connections: list[tuple[socket.socket, socket.socket]],
    caplog: pytest.LogCaptureFixture,
    head: bytes,
    keeps_copies: bool,
) -> None:
    here, there = socket.socketpair()
    taken = Taken()
    dropped: asyncio.Queue[None] = asyncio.Queue()
    sender = ConnectionPipe(here, lambda *_: None, lambda: None, keeps_copies=keeps_copies)
    receiver = receiving(
        there,
        taken,
        on_dropped=lambda: dropped.put_nowait(None),
        keeps_copies=keeps_copies,
    )
    (first, other_of_first), (second, other_of_second) = connections[:2]
    with no_descriptor_allowed():
        sender.send(first, head)
        await dropped.get()
    await closed(first)
    assert other_of_first.recv(1) == b""
    sender.send(second, head)
    connection, read = await taken.get()
    connection.sendall(b"here")
    assert (other_of_second.recv(9), read) == (b"here", head)
    assert caplog.text.count("no descriptor left") == 1
    connection.close()
    receiver.close()
    sender.close()


@pytest.mark.parametrize("keeps_copies", [False, True])
async def test_a_system_that_refuses_to_read_a_descriptor_drops_it(
    connections: list[tuple[socket.socket, socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
    keeps_copies: bool,
) -> None:
    """Keep the bytes that the descriptor came with, as macOS does."""
    recv_fds = socket.recv_fds
    refusals = [OSError(errno.EMSGSIZE, "Message too long")]

    def refuse(*arguments: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return recv_fds(*arguments)

    monkeypatch.setattr(socket, "recv_fds", refuse)
    here, there = socket.socketpair()
    taken = Taken()
    dropped: asyncio.Queue[None] = asyncio.Queue()
    sender = ConnectionPipe(here, lambda *_: None, lambda: None, keeps_copies=keeps_copies)
    receiver = receiving(
        there,
        taken,
        on_dropped=lambda: dropped.put_nowait(None),
        keeps_copies=keeps_copies,
    )
    sender.send(connections[0][0], b"first")
    sender.send(connections[1][0], b"second")
    await dropped.get()
    connection, head = await taken.get()
    assert head == b"second"
    await closed(connections[0][0])
    connection.close()
    receiver.close()
    sender.close()


async def test_a_connection_waits_that_comes_before_an_acknowledgement(
    connections: list[tuple[socket.socket, socket.socket]],
) -> None:
    here, there = socket.socketpair()
    taken = Taken()
    full = receiving(
        here,
        taken,
        on_dropped=lambda: pytest.fail("a connection was dropped"),
        keeps_copies=True,
    )
    other = ConnectionPipe(
        there, lambda arrived, _: arrived.close(), lambda: None, keeps_copies=True
    )
    full.send(connections[0][0], b"to the other")
    # Another connection is in the spare's place.
    full._spare.close()
    with no_descriptor_left():
        other.send(connections[1][0], b"to the full one")
        # Both have read what they can.
        for _ in range(20):
            await asyncio.sleep(0)
    connection, head = await taken.get()
    assert head == b"to the full one"
    connection.close()
    full.close()
    other.close()


@pytest.mark.parametrize("reason", LATER)
async def test_descriptors_on_their_way_are_bounded_by_the_system(
    connections: list[tuple[socket.socket, socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
    reason: int,
) -> None:
    refusals = [OSError(reason, os.strerror(reason))] * 3
    send_fds = socket.send_fds

    def refuse(*arguments: Any) -> int:
        if refusals:
            raise refusals.pop()
        return send_fds(*arguments)

    monkeypatch.setattr(socket, "send_fds", refuse)
    monkeypatch.setattr(connections_module, "RETRY_S", 0.001)
    here, there = socket.socketpair()
    taken = Taken()
    sender = ConnectionPipe(here, lambda *_: None, lambda: pytest.fail("the pipe is there"))
    receiver = ConnectionPipe(there, lambda *arrived: taken.put_nowait(arrived), lambda: None)
    for number in range(3):
        sender.send(connections[number][0], b"%d" % number)
    for number in range(3):
        connection, head = await taken.get()
        assert head == b"%d" % number
        connection.close()
    receiver.close()
    sender.close()


# LARGE: more than what the sockets of a connection hold.
LARGE = b"x" * 20_000_000


async def large_answer(scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] != "http" or scope["path"] == "/here"
    await Response(LARGE)(scope, receive, send)


@asynccontextmanager
async def serving_here(given_away: asyncio.Queue[Any]) -> AsyncIterator[ConnectionServer]:
    """Yield a server of ``/here``, which gives connections with other requests away."""
    server = ConnectionServer(
        large_answer,
        ServerConfig(),
        serves=lambda method, path: path == "/here",
        hand_over=lambda *connection: given_away.put_nowait(connection),
    )
    server.uvicorn.config.lifespan = "off"
    running = asyncio.create_task(server.run())
    await server.uvicorn.is_up.wait()
    yield server
    server.uvicorn.should_exit = True
    await running


def test_an_answer_that_is_not_read_yet_is_complete_before_the_next() -> None:
    """Send the second request once all of the first answer is written."""

    async def run() -> None:
        given_away: asyncio.Queue[tuple[socket.socket, bytes]] = asyncio.Queue()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        async with serving_here(given_away) as server:
            server.adopt(accepted, b"GET /here HTTP/1.1\r\nHost: a\r\n\r\n")
            while not server.uvicorn.server_state.total_requests:  # noqa: ASYNC110
                await asyncio.sleep(0)
            while server.uvicorn.server_state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)
            elsewhere = b"GET /there HTTP/1.1\r\nHost: a\r\n\r\n"
            client.sendall(elsewhere)
            reading = asyncio.create_task(asyncio.to_thread(read_until, client, b"END"))
            connection, head = await given_away.get()
            assert head == elsewhere
            connection.setblocking(True)
            await asyncio.to_thread(connection.sendall, b"HTTP/1.1 200 OK\r\n\r\nEND")
            answers = await reading
            connection.close()
            client.close()
        first, separator, second = answers.partition(LARGE)
        assert first.startswith(b"HTTP/1.1 200 OK")
        assert (separator, second) == (LARGE, b"HTTP/1.1 200 OK\r\n\r\nEND")

    uvloop.run(run())


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Return what comes until a text, or until the end of the connection."""
    data = bytearray()
    while not data.endswith(end) and (part := connection.recv(1 << 20)):
        data += part
    return bytes(data)
