"""Connections that go from process to process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.http.connection import MAX_HEAD_BYTES
from mlx_parallm.api.http.handover import ConnectionPipe, request_line


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


async def test_connections_arrive_in_order_with_what_was_read(
    connections: list[tuple[socket.socket, socket.socket]],
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
    sender = ConnectionPipe(here, take, lost.set)
    receiver = ConnectionPipe(there, take, lambda: pytest.fail("it was closed here"))
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
