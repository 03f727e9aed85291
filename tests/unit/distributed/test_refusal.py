"""No rank takes the end of a refused one, or of rank 0 that refused it, for a loss."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlx_parallm.distributed.agreement import VERDICT, agree, answer
from mlx_parallm.distributed.link import FollowerLink, LeaderLink, Message
from mlx_parallm.distributed.watch import Watch
from mlx_parallm.types.errors import ConfigError
from tests.fake_ranks import PATIENCE_S

LONG_S = 1000.0


@dataclass
class Watched:
    """A rank's watch.

    Attributes:
        is_over: is set once it watches no more, or has noticed a loss.
        may_hear: is set once rank 0 waits until all have heard a verdict, or is lost.
    """

    rank: int
    ends: dict[int, socket.socket]
    losses: list[str] = field(default_factory=list[str])
    is_over: threading.Event = field(default_factory=threading.Event)
    may_hear: threading.Event = field(default_factory=threading.Event)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.rank, self.ends, LONG_S, self._note)
        self.watch.start()

    def _note(self, loss: str) -> None:
        self.losses.append(loss)
        self.is_over.set()
        self.may_hear.set()

    def stop(self) -> None:
        """Watch no more."""
        self.watch.stop()
        self.is_over.set()

    def end(self, compare: Callable[..., None], *arguments: Any) -> None:
        """Compare facts, and end as the process of a refused rank does."""
        with pytest.raises(ConfigError, match=r"^Rank 1 differs from rank 0: version is 2, not 1"):
            compare(*arguments, self.stop)
        self.watch.close()


@dataclass
class LateLeader:
    """Rank 0's end of a link, which goes on after a verdict once its watch is over."""

    link: LeaderLink
    watched: Watched

    def send(self, kind: int, payload: Any) -> int:
        """See ``AskingLink``."""
        number = self.link.send(kind, payload)
        if kind == VERDICT:
            self.watched.is_over.wait()
        return number

    def replies(self, number: int, timeout_s: float | None = None) -> list[Any]:
        """See ``AskingLink``."""
        return self.link.replies(number, timeout_s)


@dataclass
class WaitingLeader:
    """Rank 0's end of a link, which lets a follower hear the verdict once it waits for that."""

    link: LeaderLink
    follower: Watched
    kind: int = 0

    def send(self, kind: int, payload: Any) -> int:
        """See ``AskingLink``."""
        self.kind = kind
        return self.link.send(kind, payload)

    def replies(self, number: int, timeout_s: float | None = None) -> list[Any]:
        """See ``AskingLink``."""
        if self.kind == VERDICT:
            self.follower.may_hear.set()
        return self.link.replies(number, timeout_s)


@dataclass
class LateFollower:
    """A follower's end of a link, which is late to hear the verdict, and to go on after it."""

    link: FollowerLink
    watched: Watched
    is_refused: bool = False

    def receive(self) -> Message | None:
        """See ``AnsweringLink``."""
        message = self.link.receive()
        if message is not None and message.kind == VERDICT:
            self.is_refused = True
            self.watched.may_hear.wait()
        return message

    def reply(self, number: int, value: Any) -> None:
        """See ``AnsweringLink``."""
        self.link.reply(number, value)
        if self.is_refused:
            self.watched.is_over.wait()


@pytest.fixture
def ends() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Return the streams of a log and of beats between two ranks."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(2)]
        for end in (end for pair in pairs for end in pair):
            stack.enter_context(end)
        yield pairs


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def test_a_rank_that_hears_the_verdict_late_is_refused_and_not_lost(
    ends: list[tuple[socket.socket, socket.socket]], threads: ThreadPoolExecutor
) -> None:
    log, beats = ends
    first, second = Watched(0, {1: beats[0]}), Watched(1, {0: beats[1]})
    link = WaitingLeader(LeaderLink({1: log[0]}, {1: beats[0]}), second)
    leader = threads.submit(first.end, agree, link, {"version": "1"}, PATIENCE_S)
    follower = LateFollower(FollowerLink(1, log[1], beats[1]), second)
    second.end(answer, follower, {"version": "2"})
    leader.result()
    assert (first.losses, second.losses) == ([], [])


def test_rank_0_that_goes_on_late_refuses_and_loses_none(
    ends: list[tuple[socket.socket, socket.socket]], threads: ThreadPoolExecutor
) -> None:
    log, beats = ends
    first, second = Watched(0, {1: beats[0]}), Watched(1, {0: beats[1]})
    link = LateLeader(LeaderLink({1: log[0]}, {1: beats[0]}), first)
    leader = threads.submit(first.end, agree, link, {"version": "1"}, PATIENCE_S)
    second.end(answer, FollowerLink(1, log[1], beats[1]), {"version": "2"})
    leader.result()
    assert (first.losses, second.losses) == ([], [])
