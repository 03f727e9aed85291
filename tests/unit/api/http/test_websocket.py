"""The clocks of a WebSocket, in virtual time and without a connection."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from mlx_parallm.api.http.connection import BoundedProtocol
from mlx_parallm.api.http.websocket import WebSocket
from mlx_parallm.fairness import UNBOUNDED, Holding, SharedBudget
from tests.virtual_time import in_virtual_time

TIMEOUT_S = 10.0
TEXT, CLOSE, PING, PONG, REST, FIN = 1, 8, 9, 10, 0, 0x80


def frame(opcode: int, data: bytes = b"") -> bytes:
    """Return a frame of a client, whose mask of zeros leaves the data as they are."""
    return bytes([opcode, 0x80 | len(data)]) + b"\0" * 4 + data


class Wire(asyncio.Transport):
    """A connection whose client answers pings at once, or says nothing."""

    def __init__(self, *, answers: bool = True) -> None:
        super().__init__()
        self.transport, self.flow = self, FlowControl(self)
        self.tasks: set[asyncio.Task[None]] = set()
        self.written: list[bytes] = []
        self.answers = answers
        self.is_cut = False

    def begin(self, socket: WebSocket) -> None:
        self._socket = socket
        socket.start(cast("BoundedProtocol", self))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))
        if data[0] == FIN | PING and self.answers:
            pong = frame(FIN | PONG)
            asyncio.get_running_loop().call_soon(self._socket.data_received, pong)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.is_cut

    def close(self) -> None:
        self.is_cut = True

    def abort(self) -> None:
        self.is_cut = True
        self._socket.connection_lost()

    @property
    def opcodes(self) -> list[int]:
        return [data[0] & 0x0F for data in self.written]


def opened(wire: Wire, messages: list[bytes], *, work_s: float = 0.0) -> tuple[WebSocket, Holding]:
    """Return a WebSocket, each message of which takes ``work_s``."""

    async def serve(socket: WebSocket) -> None:
        while (message := await socket.receive()) is not None:
            messages.append(message.data)
            await asyncio.sleep(work_s)

    held = Holding(SharedBudget(UNBOUNDED, share=1000), "client")
    socket = WebSocket(serve, max_size=1000, timeout_s=TIMEOUT_S, held=held)
    wire.begin(socket)
    return socket, held


@pytest.mark.parametrize("work_s", [0.0, 5 * TIMEOUT_S], ids=["idle", "long response"])
@in_virtual_time
async def test_a_client_that_answers_pings_stays(work_s: float) -> None:
    wire, messages = Wire(), list[bytes]()
    socket, held = opened(wire, messages, work_s=work_s)
    await asyncio.sleep(4 * TIMEOUT_S)
    socket.data_received(frame(FIN | TEXT, b"x"))
    await asyncio.sleep(4 * TIMEOUT_S)
    assert set(wire.opcodes) == {PING}, "it was not closed"
    assert held.amount == 0, "pongs are not kept"
    socket.data_received(frame(TEXT, b"y") + frame(FIN | PING) + frame(FIN | REST, b"z"))
    await asyncio.sleep(2 * TIMEOUT_S)
    assert messages == [b"x", b"yz"]
    assert not socket.is_over
    socket.connection_lost()


@pytest.mark.parametrize(
    "data",
    [
        frame(TEXT, b"x"),
        frame(TEXT),
        frame(FIN | TEXT, b"x" * 100)[:50],
        frame(FIN | TEXT, b"x")[:1],
        frame(FIN | PING, b"x" * 100)[:50],
        frame(FIN | PONG) + frame(TEXT, b"x"),
        frame(FIN | TEXT, b"x") + frame(TEXT, b"x"),
    ],
    ids=["no end", "empty", "half a frame", "a byte", "half a ping", "after a pong",
         "after a message"],
)  # fmt: skip
@in_virtual_time
async def test_a_message_that_stops_half_way_is_cut(data: bytes) -> None:
    wire = Wire()
    socket, held = opened(wire, [])
    await asyncio.sleep(4.2 * TIMEOUT_S)
    socket.data_received(data)
    await asyncio.sleep(0.9 * TIMEOUT_S)
    assert not socket.is_over
    await asyncio.sleep(1.1 * TIMEOUT_S)
    assert CLOSE in wire.opcodes
    assert wire.written[-1][2:4] == (1008).to_bytes(2)
    assert held.amount == 0
    socket.connection_lost()


@in_virtual_time
async def test_pings_give_a_message_no_more_time() -> None:
    wire = Wire()
    socket, _ = opened(wire, [])
    socket.data_received(frame(TEXT, b"x"))
    for _ in range(20):
        await asyncio.sleep(TIMEOUT_S / 10)
        if not socket.is_over:
            socket.data_received(frame(FIN | PING))
    assert CLOSE in wire.opcodes
    socket.connection_lost()


@in_virtual_time
async def test_time_in_which_nothing_is_read_is_not_the_clients() -> None:
    wire, messages = Wire(), list[bytes]()
    socket, _ = opened(wire, messages, work_s=4 * TIMEOUT_S)
    for data in (b"1", b"2"):
        socket.data_received(frame(FIN | TEXT, data))
    socket.data_received(frame(TEXT, b"3"))
    await asyncio.sleep(0)
    assert wire.flow.read_paused
    # The second message is taken, and reading goes on, just before the next look.
    await asyncio.sleep(4 * TIMEOUT_S + 0.7 * TIMEOUT_S)
    assert not socket.is_over
    socket.data_received(frame(FIN | REST, b"4"))
    await asyncio.sleep(8 * TIMEOUT_S)
    assert messages == [b"1", b"2", b"34"]
    socket.connection_lost()


@in_virtual_time
async def test_a_silent_client_is_pinged_and_then_cut_off() -> None:
    wire = Wire(answers=False)
    opened(wire, [])
    await asyncio.sleep(0.6 * TIMEOUT_S)
    assert (wire.opcodes, wire.is_cut) == ([PING], False)
    await asyncio.sleep(0.5 * TIMEOUT_S)
    assert (wire.opcodes, wire.is_cut) == ([PING], True)
