"""Accepts the connections of all followers, and of no other process."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from dataclasses import dataclass, field

from mlx_parallm.distributed.handshake import (
    WELCOME,
    Caller,
    Exchange,
    StrangerError,
    StreamKind,
    greet,
)
from mlx_parallm.types.errors import ConfigError

logger = logging.getLogger(__name__)

# HANDSHAKE_S: a follower answers at once; who has not after this long is dropped.
HANDSHAKE_S = 5.0
# MOST_GUESTS: connections in a handshake at a time; the one that waits longest makes room.
MOST_GUESTS = 64


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection that has proven nothing yet."""

    end: socket.socket
    address: str
    until: float
    talk: Generator[Exchange, bytes, Caller]
    size: int = 0
    data: bytearray = field(default_factory=bytearray)


class Reception:
    """Waits for the followers' connections; one slow or strange guest keeps no other waiting."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        callers: Collection[Caller],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over a listening socket.

        Args:
            listener: the socket.
            secret: what callers must know.
            callers: all connections that must come.
            clock: returns the time, in seconds.
        """
        self._listener = listener
        self._secret = secret
        self._missing = set(callers)
        self._clock = clock
        self._guests: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._joined: dict[Caller, socket.socket] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> dict[Caller, socket.socket]:
        """Return the connections once all have come; then nobody listens any more.

        Raises:
            ConfigError: some ranks are missing after ``timeout_s``.
        """
        until = self._clock() + timeout_s
        try:
            while self._missing and (left := until - self._clock()) > 0:
                for key, _ in self._selector.select(min(left, self._patience_s())):
                    self._serve(key.fileobj)
                self._drop_late()
        finally:
            self._close()
        if self._missing:
            for end in self._joined.values():
                end.close()
            raise ConfigError(_missing_ranks(self._missing, timeout_s))
        return self._joined

    def _patience_s(self) -> float:
        """Return the seconds until the next guest is late."""
        now = self._clock()
        return max(min((guest.until - now for guest in self._guests.values()), default=60.0), 0.0)

    def _serve(self, source: object) -> None:
        if source is self._listener:
            self._accept()
        elif isinstance(source, socket.socket) and source in self._guests:
            self._hear(self._guests[source])

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

    def _hear(self, guest: _Guest) -> None:
        """Read what a guest has sent, and no byte of what follows the handshake."""
        try:
            guest.data += _received(guest.end, guest.size - len(guest.data))
            if len(guest.data) == guest.size:
                exchange = guest.talk.send(bytes(guest.data))
                guest.data.clear()
                guest.size = exchange.size
                guest.end.sendall(exchange.send)
        except StopIteration as proven:
            self._admit(guest, proven.value)
        except (OSError, StrangerError) as problem:
            self._drop(guest, str(problem))

    def _admit(self, guest: _Guest, caller: Caller) -> None:
        if caller not in self._missing:
            self._drop(guest, f"rank {caller.rank} has joined, or is none")
            return
        self._forget(guest)
        try:
            guest.end.setblocking(True)
            guest.end.sendall(WELCOME)
        except OSError:
            guest.end.close()
            return
        self._missing.remove(caller)
        self._joined[caller] = guest.end

    def _drop_late(self) -> None:
        now = self._clock()
        for guest in [guest for guest in self._guests.values() if guest.until <= now]:
            self._drop(guest, "it did not answer in time")

    def _drop(self, guest: _Guest, why: str) -> None:
        logger.warning("dropped a connection from %s to the ranks' port: %s", guest.address, why)
        self._forget(guest)
        guest.end.close()

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.end)
        del self._guests[guest.end]

    def _close(self) -> None:
        for guest in list(self._guests.values()):
            self._drop(guest, "all ranks have joined" if not self._missing else "time is up")
        self._selector.close()
        self._listener.close()


def _received(end: socket.socket, size: int) -> bytes:
    """Return the bytes that have come, at most ``size``; raise StrangerError if there are none."""
    data = end.recv(size)
    if not data:
        raise StrangerError("it hung up")
    return data


def all_callers(size: int) -> set[Caller]:
    """Return the connections that rank 0 of ``size`` ranks waits for."""
    return {Caller(rank, kind) for rank in range(1, size) for kind in StreamKind}


def _missing_ranks(missing: Collection[Caller], timeout_s: float) -> str:
    ranks = sorted({caller.rank for caller in missing})
    names = ", ".join(map(str, ranks))
    verb = "Rank {} has" if len(ranks) == 1 else "Ranks {} have"
    return (
        f"{verb.format(names)} not joined rank 0 within {timeout_s:g} s. Check that every rank "
        "runs, and that it can reach rank 0's port."
    )
