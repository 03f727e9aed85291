"""WebSockets (RFC 6455): a request of HTTP whose connection goes on with messages.

The request passes every check of a request before the connection changes; see ``SocketResponse``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextvars
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import OPEN, SEND_EOF, Side
from websockets.protocol import Protocol as Frames
from websockets.utils import accept_key

from mlx_parallm.api.http.body_budget import MIN_BYTES_PER_S
from mlx_parallm.api.http.connection import SWITCH, WEBSOCKET, BoundedProtocol
from mlx_parallm.api.http.headers import headers_of
from mlx_parallm.fairness import Holding
from mlx_parallm.types.errors import InvalidRequestError, UpgradeRequiredError

logger = logging.getLogger(__name__)
# The library logs every connection, and at debug level the content of frames.
_frames_logger = logging.getLogger(f"{__name__}.frames")
_frames_logger.setLevel(logging.ERROR)

VERSION = "13"
# NONCE_BYTES: of the key in a handshake.
NONCE_BYTES = 16
# MAX_FRAMES: frames of one message, and control frames between two messages; each takes the event
# loop some microseconds, however empty it is.
MAX_FRAMES = 16384
# SLICE_BYTES: bytes that are parsed before their frames are counted.
SLICE_BYTES = 16 * 1024
# CLOSE_S: seconds in which a client must answer the end of a connection.
CLOSE_S = 5.0


class Message(NamedTuple):
    """A message of the client; ``is_text`` is false for a binary one."""

    data: bytes
    is_text: bool


class WebSocket:
    """A connection that was given to messages. Lives on the event loop.

    What is read of messages counts in ``held`` until ``receive`` returns it. At most one message
    waits: then, and while the client does not read, nothing more is read. A client that is silent
    gets pings, and is disconnected if it stays silent for ``timeout_s``.
    """

    def __init__(
        self,
        serve: Callable[[WebSocket], Awaitable[None]],
        *,
        max_size: int,
        timeout_s: float,
        held: Holding,
    ) -> None:
        """Prepare.

        Args:
            serve: answers the messages; the connection is closed when it returns.
            max_size: most bytes of a message.
            timeout_s: see above; also the time of a message to arrive from its first byte on,
                besides its bytes at ``MIN_BYTES_PER_S``. 0 is off.
            held: counts the bytes of messages.
        """
        self._serve = serve
        self._timeout_s = timeout_s
        self._held = held
        self._frames = Frames(Side.SERVER, max_size=max_size, logger=_frames_logger)
        self._waiting: deque[Message] = deque()
        self._partial = bytearray()
        self._is_text = True
        # True from the first frame of a message to its last.
        self._is_open = False
        # The frames since the last complete message.
        self._num_frames = 0
        # When the message began that is incomplete, or a frame between two; None: none is.
        self._begin_s: float | None = None
        self._is_silent = self._is_busy = self._is_leaving = self._is_ended = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._wire: BoundedProtocol

    def start(self, wire: BoundedProtocol) -> None:
        """Serve a connection whose handshake was answered."""
        self._wire = wire
        wire.flow.resume_reading()
        self._set_timer()
        task = self._loop.create_task(self._run(), context=contextvars.Context())
        wire.tasks.add(task)
        task.add_done_callback(wire.tasks.discard)

    @property
    def is_over(self) -> bool:
        """True once no message can be read or sent."""
        return self._frames.state is not OPEN

    async def receive(self) -> Message | None:
        """Return the next message; None at the end of the connection."""
        self._is_busy = False
        if self._is_leaving:
            self.close(CloseCode.SERVICE_RESTART)
        while not self._waiting and not self.is_over:
            self._changed.clear()
            await self._changed.wait()
        if self.is_over:
            return None
        self._is_busy = True
        message = self._waiting.popleft()
        self._hold()
        self._read_on()
        return message

    async def send(self, text: bytes) -> None:
        """Send a text in UTF-8, once the client has read most of what was sent before."""
        if not self.is_over:
            self._frames.send_text(text)
            self._flush()
            await self._wire.flow.drain()

    async def wait_for_end(self) -> None:
        """Return once the connection has ended."""
        while not self.is_over:
            await self._changed.wait()
            self._changed.clear()

    def close(self, code: CloseCode, reason: str = "") -> None:
        """End the connection, unless it has ended."""
        if not self.is_over:
            self._frames.send_close(code, reason)
            self._flush()

    def shutdown(self) -> None:
        """End the connection, once the message is answered that is worked on."""
        self._is_leaving = True
        if not self._is_busy:
            self.close(CloseCode.SERVICE_RESTART)

    def data_received(self, data: bytes) -> None:
        """Take in what the client has sent."""
        self._is_silent = False
        if not self.is_over and not self._held.grow(len(data)):
            self._fail(CloseCode.TRY_AGAIN_LATER, "your other requests use all of your memory")
        self._start_clock()
        for begin in range(0, len(data), SLICE_BYTES):
            # After the end, this drops it.
            self._frames.receive_data(data[begin : begin + SLICE_BYTES])
            for event in self._frames.events_received():
                # The other events are of handshakes.
                self._take(cast("Frame", event))
        if self._is_open or self._num_bytes:
            self._start_clock()
        self._flush()
        self._hold()
        self._read_on()

    def connection_lost(self) -> None:
        """Note that the client is gone."""
        self._cancel_timer()
        if not self._frames.reader.eof:
            self._frames.receive_eof()
        self._end()

    def pause_writing(self) -> None:
        """Read no more from a client that reads nothing: pings would be answered into memory."""
        self._wire.flow.pause_reading()

    def resume_writing(self) -> None:
        """Read again."""
        self._read_on()

    async def _run(self) -> None:
        try:
            await self._serve(self)
        except Exception:
            logger.exception("a WebSocket failed")
            self.close(CloseCode.INTERNAL_ERROR)
        finally:
            self.close(CloseCode.NORMAL_CLOSURE)

    def _take(self, frame: Frame) -> None:
        self._num_frames += 1
        if self._num_frames > MAX_FRAMES:
            self._fail(CloseCode.POLICY_VIOLATION, "too many frames")
        is_control = frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
        if is_control or self.is_over:
            # A control frame within a message gives that no more time.
            self._begin_s = self._begin_s if self._is_open else None
            return
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._partial += frame.data
        self._is_open = not frame.fin
        if frame.fin:
            self._complete()

    def _complete(self) -> None:
        message = Message(bytes(self._partial), self._is_text)
        self._partial = bytearray()
        self._num_frames, self._begin_s = 0, None
        if message.is_text and not _is_utf8(message.data):
            self._fail(CloseCode.INVALID_DATA, "not UTF-8")
            return
        self._waiting.append(message)
        self._changed.set()

    def _fail(self, code: CloseCode, reason: str) -> None:
        if not self.is_over:
            self._frames.fail(code, reason)

    def _flush(self) -> None:
        """Write what is to be written; at the end, wait for the client to close."""
        for data in self._frames.data_to_send():
            if data != SEND_EOF:
                self._wire.transport.write(data)
            elif self._frames.close_rcvd is not None:
                self._wire.transport.close()
            elif self._wire.transport.can_write_eof():
                self._wire.transport.write_eof()
        if self.is_over:
            self._end()

    def _end(self) -> None:
        """Give back what is held. What still comes is dropped, for a short time."""
        if self._is_ended:
            return
        self._is_ended = True
        self._cancel_timer()
        if not self._wire.transport.is_closing():
            self._timer = self._loop.call_later(CLOSE_S, self._wire.transport.abort)
        self._waiting.clear()
        self._partial = bytearray()
        self._held.release()
        self._changed.set()

    @property
    def _num_bytes(self) -> int:
        """The bytes that are kept of the incomplete message and the incomplete frame."""
        return len(self._partial) + len(self._frames.reader.buffer)

    def _hold(self) -> None:
        """Count what is kept, and not what control frames were."""
        if not self._is_ended:
            self._held.release()
            self._held.grow(self._num_bytes + sum(len(each.data) for each in self._waiting))

    def _read_on(self) -> None:
        """Read unless a message waits, or the client does not read."""
        if self._wire.flow.write_paused or (self._waiting and not self.is_over):
            self._wire.flow.pause_reading()
        elif not self._wire.transport.is_closing():
            if self._wire.flow.read_paused:
                # The client could say nothing meanwhile.
                self._is_silent = False
                self._begin_s = None if self._begin_s is None else self._loop.time()
            self._wire.flow.resume_reading()

    def _set_timer(self) -> None:
        if self._timeout_s:
            self._timer = self._loop.call_later(self._timeout_s / 2, self._look)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """End the connection if the client is gone, or a message takes too long; else ping."""
        if not self._wire.flow.read_paused:
            if self._is_silent:
                self._wire.transport.abort()
                return
            if self._is_late():
                self._fail(CloseCode.POLICY_VIOLATION, "the message did not arrive in time")
                self._flush()
                return
            self._is_silent = True
            self._frames.send_ping(b"")
            self._flush()
        self._set_timer()

    def _start_clock(self) -> None:
        if self._begin_s is None:
            self._begin_s = self._loop.time()

    def _is_late(self) -> bool:
        if self._begin_s is None:
            return False
        allowed_s = self._timeout_s + self._num_bytes / MIN_BYTES_PER_S
        return self._loop.time() - self._begin_s > allowed_s


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class SocketResponse(Response):
    """Accepts the WebSocket that a request offers; no body follows."""

    def __init__(self, scope: Scope, socket: WebSocket) -> None:
        """Prepare.

        Args:
            scope: the request's; see ``check_handshake``.
            socket: goes on with the connection.
        """
        key = headers_of(scope)["sec-websocket-key"]
        super().__init__(
            status_code=101,
            headers={
                "upgrade": WEBSOCKET,
                "connection": "Upgrade",
                "sec-websocket-accept": accept_key(key),
            },
        )
        del self.headers["content-length"]
        self._socket = socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        scope[SWITCH](self._socket)
        await super().__call__(scope, receive, send)


def check_handshake(scope: Scope) -> None:
    """Refuse a request that offers no WebSocket, or one that is malformed.

    Raises:
        UpgradeRequiredError: it offers none, or another version.
        InvalidRequestError: its key is malformed.
    """
    headers = headers_of(scope)
    if SWITCH not in scope or headers.get("sec-websocket-version") != VERSION:
        raise UpgradeRequiredError(
            f"This route takes WebSockets of version {VERSION}; a POST needs none."
        )
    name = "sec-websocket-key"
    try:
        nonce = base64.b64decode(headers.get(name, ""), validate=True)
    except binascii.Error:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise InvalidRequestError(f"{name} must be {NONCE_BYTES} bytes in base64.", param=name)
