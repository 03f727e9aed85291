"""TCP connections between processes that know the same secret."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.handshake import WELCOME, Caller, Exchange, StrangerError, call, greet

logger = logging.getLogger(__name__)

# HANDSHAKE_S: callers answer at once; who has not after this long is dropped.
HANDSHAKE_S = 5.0
# MOST_GUESTS: connections in a handshake at a time; the one that waits longest makes room.
MOST_GUESTS = 64
# PATIENCE_S: seconds that an acceptor without guests waits before it looks at the clock.
PATIENCE_S = 60.0


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection that has proven nothing yet."""

    end: socket.socket
    address: str
    until: float
    talk: Generator[Exchange, bytes, Caller]
    size: int = 0
    data: bytearray = field(default_factory=bytearray)


class Acceptor:
    """Accepts connections of callers who know a secret; a slow guest keeps no other waiting."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        refuse: Callable[[Caller], str | None],
        port: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over a listening socket.

        Args:
            listener: the socket.
            secret: what callers must know.
            refuse: returns why a caller is dropped all the same; None: it is welcomed.
            port: what the socket is for, in log lines.
            clock: returns the time, in seconds.
        """
        self._listener = listener
        self._secret = secret
        self._refuse = refuse
        self._port = port
        self._clock = clock
        self._guests: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def welcomed(self, until: float = inf) -> Generator[tuple[Caller, socket.socket]]:
        """Yield each caller that was welcomed, and the connection, up to this time."""
        while (left := until - self._clock()) > 0:
            for key, _ in self._selector.select(min(left, self._patience_s())):
                yield from self._serve(key.fileobj)
            self._drop_late()

    def _patience_s(self) -> float:
        """Return the seconds until the next guest is late."""
        now = self._clock()
        late_s = (guest.until - now for guest in self._guests.values())
        return max(min(late_s, default=PATIENCE_S), 0.0)

    def _serve(self, source: object) -> Generator[tuple[Caller, socket.socket]]:
        if source is self._listener:
            self._accept()
        elif isinstance(source, socket.socket) and source in self._guests:
            guest = self._guests[source]
            caller = self._hear(guest)
            if caller is not None and self._admits(guest, caller):
                yield caller, guest.end

    def _accept(self) -> None:
        with suppress(OSError):
            end, address = self._listener.accept()
            end.setblocking(False)
            talk = greet(self._secret)
            guest = _Guest(end, str(address[0]), self._clock() + HANDSHAKE_S, talk)
            guest.size = next(talk).size
            self._guests[end] = guest
            self._selector.register(end, selectors.EVENT_READ)
            if len(self._guests) > MOST_GUESTS:
                self._drop(next(iter(self._guests.values())), "too many others wait")

    def _hear(self, guest: _Guest) -> Caller | None:
        """Read what a guest has sent, and no byte of what follows the handshake."""
        try:
            guest.data += _received(guest.end, guest.size - len(guest.data))
            if len(guest.data) == guest.size:
                exchange = guest.talk.send(bytes(guest.data))
                guest.data.clear()
                guest.size = exchange.size
                guest.end.sendall(exchange.send)
        except StopIteration as proven:
            return proven.value
        except (OSError, StrangerError) as problem:
            self._drop(guest, str(problem))
        return None

    def _admits(self, guest: _Guest, caller: Caller) -> bool:
        refusal = self._refuse(caller)
        if refusal is not None:
            self._drop(guest, refusal)
            return False
        self._forget(guest)
        try:
            guest.end.setblocking(True)
            guest.end.sendall(WELCOME)
        except OSError:
            guest.end.close()
            return False
        return True

    def _drop_late(self) -> None:
        now = self._clock()
        for guest in [guest for guest in self._guests.values() if guest.until <= now]:
            self._drop(guest, "it did not answer in time")

    def _drop(self, guest: _Guest, why: str) -> None:
        logger.warning("dropped a connection from %s to %s: %s", guest.address, self._port, why)
        self._forget(guest)
        guest.end.close()

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.end)
        del self._guests[guest.end]

    def close(self, why: str) -> None:
        """Stop to listen; the guests are dropped for this reason."""
        for guest in list(self._guests.values()):
            self._drop(guest, why)
        self._selector.close()
        self._listener.close()


def _received(end: socket.socket, size: int) -> bytes:
    """Return the bytes that have come, at most ``size``; raise StrangerError if there are none."""
    data = end.recv(size)
    if not data:
        raise StrangerError("it hung up")
    return data


def connect(
    address: tuple[str, int], secret: bytes, caller: Caller, timeout_s: float
) -> socket.socket:
    """Return a connection whose other end has proven that it knows the secret.

    Raises:
        OSError: it cannot be reached.
        StrangerError: who listens there does not know the secret, or does not welcome the caller.
    """
    until = time.monotonic() + timeout_s
    end = socket.create_connection(address, timeout=max(timeout_s, 0.001))
    try:
        _shake_hands(end, call(secret, caller), until)
        end.settimeout(None)
    except BaseException:
        end.close()
        raise
    return end


def _shake_hands(end: socket.socket, talk: Generator[Exchange, bytes, None], until: float) -> None:
    exchange = next(talk)
    with suppress(StopIteration):
        while True:
            end.sendall(exchange.send)
            exchange = talk.send(_read(end, exchange.size, until))


def _read(end: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        end.settimeout(max(until - time.monotonic(), 0.001))
        data += _received(end, size - len(data))
    return data


def tcp_channel(end: socket.socket) -> Channel:
    """Return a channel over a connection between machines."""
    if end.family in (socket.AF_INET, socket.AF_INET6):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(end, socket_bytes=None)
