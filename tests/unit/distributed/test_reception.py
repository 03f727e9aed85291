"""Followers join rank 0 past strangers, who are dropped whatever they send."""

from __future__ import annotations

import logging
import pickle
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pytest

from mlx_parallm.distributed.addresses import LOOPBACK, Offer, listen
from mlx_parallm.distributed.reception import KINDS, Reception, all_callers
from mlx_parallm.peers.handshake import HELLO, PROTOCOL, Caller, StrangerError, StreamKind
from mlx_parallm.peers.network import MOST_GUESTS, connect
from mlx_parallm.types.errors import ConfigError
from tests.fake_ranks import PATIENCE_S

SECRET = b"s" * 32


@dataclass
class Clock:
    """A clock that goes on by a step each time it is read."""

    now: float = 0.0
    step: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Detonator:
    """Its pickle fails a test where it is read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a stranger's pickle was read",))


@dataclass
class Door:
    """The port at which a reception waits on a thread."""

    address: tuple[str, int]
    reception: Reception
    clock: Clock
    threads: ThreadPoolExecutor

    def open(self, timeout_s: float = PATIENCE_S) -> Future[dict[Caller, socket.socket]]:
        """Start to wait for the followers."""
        return self.threads.submit(self.reception.wait, timeout_s)

    def join(self, rank: int, kind: StreamKind, secret: bytes = SECRET) -> socket.socket:
        """Return a follower's connection."""
        return connect(self.address, secret, Caller(rank, kind), PATIENCE_S)

    def stranger(self, data: bytes = b"") -> socket.socket:
        """Return a connection that has sent ``data``."""
        end = socket.create_connection(self.address, timeout=PATIENCE_S)
        with suppress(OSError):
            end.sendall(data)
        return end


@pytest.fixture
def door() -> Iterator[Door]:
    listener = listen(Offer((LOOPBACK,), is_explicit=True))
    clock = Clock()
    reception = Reception(listener, SECRET, all_callers(3), clock)
    with ThreadPoolExecutor() as threads:
        yield Door(listener.getsockname(), reception, clock, threads)


def join_all(door: Door) -> list[socket.socket]:
    return [door.join(caller.number, caller.kind) for caller in all_callers(3)]


def is_dropped(end: socket.socket) -> bool:
    with end:
        try:
            while end.recv(1 << 10):
                pass
        except ConnectionResetError:
            pass
    return True


def test_every_connection_is_known_by_its_rank_and_its_use(door: Door) -> None:
    joined = door.open()
    for rank, kind in [(2, StreamKind.BEATS), (1, StreamKind.LOG), (1, StreamKind.BEATS)]:
        with door.join(rank, kind) as end:
            end.sendall(b"%d%d" % (rank, kind))
    with door.join(2, StreamKind.LOG) as end:
        end.sendall(b"20")
        ends = joined.result()
    assert set(ends) == all_callers(3)
    for caller, end in ends.items():
        with end:
            assert end.recv(9) == b"%d%d" % (caller.number, caller.kind)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"GET / HTTP/1.1\r\n\r\n" * 9,
        pickle.dumps(Detonator()),
        HELLO.pack(PROTOCOL, 1, 0, bytes(32), bytes(32)),
        HELLO.pack(PROTOCOL, 1, 0, bytes(32), bytes(32)) + b"x" * 32,
        HELLO.pack(PROTOCOL, 1, 0, bytes(32), bytes(32)) + pickle.dumps(Detonator()) * 9,
    ],
    ids=["silence", "little", "http", "pickle", "hello", "wrong proof", "pickle for a proof"],
)
def test_strangers_keep_nobody_out(
    door: Door, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = [door.stranger(data) for _ in range(3)]
    joined = door.open()
    ends = join_all(door)
    assert set(joined.result()) == all_callers(3)
    assert all(is_dropped(end) for end in strangers)
    assert "dropped a connection from 127.0.0.1 to the ranks' port: " in caplog.text
    for end in [*ends, *joined.result().values()]:
        end.close()


def test_a_stranger_that_hangs_up_is_forgotten(door: Door) -> None:
    joined = door.open()
    for data in (b"", b"\x00" * 5):
        door.stranger(data).close()
    ends = join_all(door)
    for end in [*ends, *joined.result().values()]:
        end.close()


def test_a_wrong_secret_is_found_out(door: Door) -> None:
    joined = door.open()
    with pytest.raises(StrangerError):
        door.join(1, StreamKind.LOG, secret=b"t" * 32)
    ends = join_all(door)
    for end in [*ends, *joined.result().values()]:
        end.close()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_ranks_join_once_and_no_others_do(
    door: Door, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    joined = door.open()
    first = door.join(1, StreamKind.LOG)
    with pytest.raises((StrangerError, OSError)):
        door.join(rank, StreamKind.LOG)
    rest = [door.join(c.number, c.kind) for c in all_callers(3) - {Caller(1, StreamKind.LOG)}]
    assert f"rank {rank} has joined, or is none" in caplog.text
    for end in [first, *rest, *joined.result().values()]:
        end.close()


def test_who_holds_a_connection_is_dropped(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    stranger = door.stranger(b"\x00" * 3)
    door.clock.step = 3.0
    with pytest.raises(ConfigError, match="Ranks 1, 2 have not joined rank 0 within 20 s"):
        door.open(20.0).result()
    assert is_dropped(stranger)
    assert "it did not answer in time" in caplog.text


def test_the_guest_that_waits_longest_makes_room(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    joined = door.open()
    with caplog.at_level(logging.WARNING):
        strangers = [door.stranger() for _ in range(MOST_GUESTS + 1)]
        assert is_dropped(strangers[0])
        ends = join_all(door)
    assert "too many others wait" in caplog.text
    assert all(is_dropped(end) for end in strangers[1:])
    for end in [*ends, *joined.result().values()]:
        end.close()


def test_missing_ranks_are_named(door: Door) -> None:
    joined = door.open(30.0)
    ends = [door.join(1, kind) for kind in KINDS]
    door.clock.now = 31.0
    # A connection wakes the reception, so that it reads the clock.
    with suppress(OSError):
        door.stranger().close()
    with pytest.raises(ConfigError, match="Rank 2 has not joined rank 0 within 30 s"):
        joined.result()
    assert all(is_dropped(end) for end in ends)


def test_nobody_listens_once_all_have_joined(door: Door) -> None:
    joined = door.open()
    ends = [*join_all(door), *joined.result().values()]
    with pytest.raises(ConnectionRefusedError):
        door.stranger()
    for end in ends:
        end.close()
