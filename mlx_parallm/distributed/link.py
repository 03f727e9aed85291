"""The link between rank 0 and the followers: a star of TCP streams, one log each.

What rank 0 sends reaches every follower once and in order. Followers reply to messages by their
numbers. A second stream beside each log carries beats, see ``watch``.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_parallm.distributed.addresses import find_addresses, listen
from mlx_parallm.distributed.reception import KINDS, Reception, all_callers
from mlx_parallm.peers.channel import UnreadableError, pack
from mlx_parallm.peers.handshake import SECRET_BYTES, Caller, StrangerError, StreamKind
from mlx_parallm.peers.network import connect, tcp_channel
from mlx_parallm.types.errors import ConfigError, RankLostError

#: ``LINK_SHARE``: the share of the seconds for joining in which rank 0 waits for the followers'
#: streams, and they for it.
LINK_SHARE = 0.8
# GOODBYE_S: seconds that rank 0 waits for followers to read its goodbye.
GOODBYE_S = 5.0
# GOODBYE: the kind of the message that ends a log. Callers use smaller kinds.
GOODBYE = 255


class Broadcast(Protocol):
    """The part of ``Ranks`` that a link needs."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's ``data``; other ranks pass None."""
        ...


@dataclass(frozen=True, slots=True)
class Message:
    """A message of rank 0.

    Attributes:
        kind: what the payload is; below ``GOODBYE``.
        payload: bytes, or any object that can be pickled.
        number: of the message; a reply names it.
    """

    kind: int
    payload: Any
    number: int


class LeaderLink:
    """Rank 0's end.

    Messages may be sent by any thread, and replies awaited by one. A follower's reply must be
    awaited before much more is sent, because it waits until it is read.

    Attributes:
        beats: the streams of beats, by rank.
        num_messages: messages sent so far.
        num_bytes: bytes that each follower got so far.
    """

    def __init__(
        self, logs: Mapping[int, socket.socket], beats: Mapping[int, socket.socket]
    ) -> None:
        """Take over the connections to the followers, by rank."""
        self._ends = dict(sorted(logs.items()))
        self._channels = {rank: tcp_channel(end) for rank, end in self._ends.items()}
        self.beats = dict(sorted(beats.items()))
        self._lock = threading.Lock()
        self._early: dict[int, dict[int, Any]] = {rank: {} for rank in self._ends}
        self.num_messages = 0
        self.num_bytes = 0

    @classmethod
    def open(
        cls,
        ranks: Broadcast,
        host: str | None,
        timeout_s: float,
        *,
        port: int = 0,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> LeaderLink:
        """Listen, send the followers the address, and wait until all have joined.

        Args:
            ranks: all ranks; this is rank 0.
            host: the only address that is offered; None for those of the launcher or the machine.
            timeout_s: most seconds to wait.
            port: the port; 0 for any.
            environment: the launcher's variables.
            clock: returns the time, in seconds.

        Raises:
            ConfigError: the port is taken, or ranks are missing.
        """
        offer = find_addresses(host, environment)
        try:
            listener = listen(offer, port)
        except ConfigError as problem:
            ranks.broadcast(json.dumps({"problem": str(problem)}).encode())
            raise
        secret = secrets.token_bytes(SECRET_BYTES)
        where = {"hosts": offer.hosts, "port": listener.getsockname()[1], "secret": secret.hex()}
        reception = Reception(listener, secret, all_callers(ranks.size), clock)
        ranks.broadcast(json.dumps(where).encode())
        ends = reception.wait(timeout_s)
        logs, beats = (
            {caller.number: end for caller, end in ends.items() if caller.kind is kind}
            for kind in KINDS
        )
        return cls(logs, beats)

    def send(self, kind: int, payload: Any) -> int:
        """Send a message to all followers; return its number.

        Large arrays in the payload are not copied, and it is pickled once.

        Raises:
            ControlError: it cannot be pickled; nothing was sent.
            RankLostError: a follower is gone.
        """
        packed = pack((kind, payload))
        with self._lock:
            self.num_messages += 1
            self.num_bytes += packed.nbytes
            for rank, channel in self._channels.items():
                try:
                    channel.send_packed(packed, self.num_messages)
                except OSError as problem:
                    raise RankLostError(rank, "is gone") from problem
            return self.num_messages

    def replies(self, number: int, timeout_s: float | None = None) -> list[Any]:
        """Return the replies of all followers to a message, by rank; rank 1 is the first.

        Raises:
            RankLostError: a follower is gone, or has not replied within ``timeout_s``.
        """
        return [self._reply(rank, number, timeout_s) for rank in self._channels]

    def _reply(self, rank: int, number: int, timeout_s: float | None) -> Any:
        early, channel = self._early[rank], self._channels[rank]
        self._ends[rank].settimeout(timeout_s)
        try:
            while number not in early:
                value, answered = channel.receive()
                early[answered] = value
        except (EOFError, UnreadableError) as problem:
            late = timeout_s is not None
            why = f"is gone, or has not replied within {timeout_s:g} s" if late else "is gone"
            raise RankLostError(rank, why) from problem
        finally:
            with suppress(OSError):
                self._ends[rank].settimeout(None)
        return early.pop(number)

    def abort(self) -> None:
        """Hang up, so that no thread waits for a follower any more."""
        for channel in self._channels.values():
            channel.hang_up()

    def close(self, *, goodbye: bool = True) -> None:
        """End the link.

        With ``goodbye`` followers end normally, and this waits a little until they have read it;
        without, they take this process for dead. The streams of beats belong to ``watch``.
        """
        if goodbye:
            with suppress(RankLostError):
                self.send(GOODBYE, None)
            for end in self._ends.values():
                wait_for_end(end)
        for channel in self._channels.values():
            channel.close()


class FollowerLink:
    """A follower's end.

    Attributes:
        rank: this process's rank.
        beats: the stream of beats.
    """

    def __init__(self, rank: int, log: socket.socket, beats: socket.socket) -> None:
        """Take over the connections to rank 0."""
        self.rank = rank
        self.beats = beats
        self._channel = tcp_channel(log)

    @classmethod
    def open(cls, ranks: Broadcast, timeout_s: float) -> FollowerLink:
        """Learn where rank 0 listens, and join it.

        Raises:
            ConfigError: rank 0 cannot listen, or none of its addresses can be reached.
        """
        where: dict[str, Any] = json.loads(ranks.broadcast(None))
        if "problem" in where:
            raise ConfigError(where["problem"])
        secret, port = bytes.fromhex(where["secret"]), int(where["port"])
        problems: list[str] = []
        until = time.monotonic() + timeout_s
        for place, host in enumerate(where["hosts"]):
            # The addresses that are left share the time that is left.
            share_s = (until - time.monotonic()) / (len(where["hosts"]) - place)
            try:
                return cls(ranks.rank, *_connect_both((host, port), secret, ranks.rank, share_s))
            except (OSError, StrangerError) as problem:
                problems.append(f"{host}:{port}: {problem}")
        raise ConfigError(
            f"Rank {ranks.rank} cannot reach rank 0 ({'; '.join(problems)}). Name an address of "
            "rank 0 that all ranks can reach."
        )

    def receive(self) -> Message | None:
        """Return the next message; None after rank 0's goodbye.

        Raises:
            RankLostError: rank 0 is gone without a goodbye.
            UnreadableError: the message cannot be unpickled here; the next one can be received.
        """
        try:
            (kind, payload), number = self._channel.receive()
        except EOFError as problem:
            raise RankLostError(0, "is gone") from problem
        return None if kind == GOODBYE else Message(kind, payload, number)

    def reply(self, number: int, value: Any) -> None:
        """Answer a message.

        Raises:
            ControlError: the value cannot be pickled; nothing was sent.
            RankLostError: rank 0 is gone.
        """
        try:
            self._channel.send(value, number)
        except OSError as problem:
            raise RankLostError(0, "is gone") from problem

    def abort(self) -> None:
        """Hang up, so that no thread waits for rank 0 any more."""
        self._channel.hang_up()

    def close(self) -> None:
        """End the link; rank 0 takes this process for dead unless it has said goodbye."""
        self._channel.close()


def _connect_both(
    address: tuple[str, int], secret: bytes, rank: int, timeout_s: float
) -> tuple[socket.socket, socket.socket]:
    """Return the connections for a follower's log and for its beats."""
    log = connect(address, secret, Caller(rank, StreamKind.LOG), timeout_s)
    try:
        return log, connect(address, secret, Caller(rank, StreamKind.BEATS), timeout_s)
    except BaseException:
        log.close()
        raise


def wait_for_end(end: socket.socket) -> None:
    """Send no more, and wait for some seconds until the other end has read everything.

    A socket that is closed with unread bytes resets the connection, and what was sent last is lost.
    """
    with suppress(OSError):
        end.shutdown(socket.SHUT_WR)
        end.settimeout(GOODBYE_S)
        while end.recv(1 << 16):
            pass
