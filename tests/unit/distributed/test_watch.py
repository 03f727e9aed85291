"""Ranks report their progress to each other, and notice streams that end."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from mlx_parallm.distributed import watch as watching
from mlx_parallm.distributed.watch import BEAT, Watch
from tests.fake_ranks import PATIENCE_S

# The time between beats is a fourth of the timeout.
TIMEOUT_S = 0.2
LONG_S = 1000.0


@dataclass
class Rank:
    """A rank's watch, and the losses that it noticed."""

    rank: int
    ends: dict[int, socket.socket]
    timeout_s: float = LONG_S
    losses: queue.Queue[str] = field(default_factory=queue.Queue[str])
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.rank, self.ends, self.timeout_s, self.losses.put)

    def loss(self) -> str:
        """Return the loss that is noticed."""
        return self.losses.get(timeout=PATIENCE_S)


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BEAT_S", 0.01)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Return rank 0 and two followers, which are started."""
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    ranks = [Rank(0, {rank: pair[0] for rank, pair in pairs.items()})]
    ranks += [Rank(rank, {0: pair[1]}) for rank, pair in pairs.items()]
    for rank in ranks:
        rank.watch.start()
    yield ranks
    for rank in ranks:
        rank.watch.stop()
    for rank in ranks:
        rank.watch.close()


def test_rank_0_hears_of_the_progress_of_all(ranks: list[Rank]) -> None:
    leader, first, second = (rank.watch for rank in ranks)
    for watch in (leader, first, second):
        watch.begin()
    first.end()
    wanted = {1: (1, 1), 2: (1, 0)}
    is_heard = threading.Event()
    while {
        rank: (report.num_begun, report.num_ended) for rank, report in leader.report().items()
    } != wanted:
        assert not is_heard.wait(0.001)  # time limit: of one question
    assert all(report.age_s < PATIENCE_S for report in leader.report().values())
    assert leader.skew_s() >= 0.0
    assert all(rank.losses.empty() for rank in ranks)


def test_a_stream_that_ends_is_a_loss_for_both_sides(ranks: list[Rank]) -> None:
    leader, first, second = ranks
    second.watch.close()
    assert leader.loss() == "rank 2 is gone"
    leader.watch.close()
    assert first.loss() == "rank 0 is gone"
    assert second.losses.empty()


def test_streams_that_end_after_a_stop_are_no_losses(ranks: list[Rank]) -> None:
    leader, *followers = ranks
    leader.watch.stop()
    for follower in followers:
        follower.watch.close()
    leader.watch.close()
    assert all(rank.losses.empty() for rank in ranks)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_stopped_rank_is_lost(ends: tuple[socket.socket, socket.socket]) -> None:
    rank = Rank(0, {1: ends[0]}, TIMEOUT_S)
    rank.watch.start()
    assert rank.loss().startswith("rank 1 has been silent for ")
    rank.watch.close()


def test_an_op_that_never_ends_is_a_loss(ends: tuple[socket.socket, socket.socket]) -> None:
    rank = Rank(0, {1: ends[0]}, TIMEOUT_S)
    rank.watch.begin()
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(TIMEOUT_S / 10):
            ends[1].send(BEAT.pack(1, 0, 0.0))

    thread = threading.Thread(target=beat)
    thread.start()
    rank.watch.start()
    loss = rank.loss()
    is_over.set()
    thread.join()
    rank.watch.close()
    assert loss.startswith("ranks 0, 1 have made no progress for ")


def test_beats_in_parts_are_put_together(ends: tuple[socket.socket, socket.socket]) -> None:
    rank = Rank(0, {1: ends[0]})
    rank.watch.start()
    beats = BEAT.pack(1, 0, 0.0) + BEAT.pack(7, 6, 0.0)
    is_heard = threading.Event()
    for part in (beats[:5], beats[5:30], beats[30:]):
        ends[1].sendall(part)
        assert not is_heard.wait(0.01)  # time limit: between the parts
    while rank.watch.report()[1].num_begun != 7:
        assert not is_heard.wait(0.001)  # time limit: of one question
    assert rank.watch.report()[1].num_ended == 6
    rank.watch.close()


def test_a_stream_that_is_full_does_not_stop_the_beats(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].setblocking(False)
    with suppress(BlockingIOError):
        while True:
            ends[0].send(bytes(1000))
    rank = Rank(0, {1: ends[0]})
    rank.watch.start()
    ends[1].sendall(BEAT.pack(3, 2, 0.0))
    is_heard = threading.Event()
    while rank.watch.report()[1].num_begun != 3:
        assert not is_heard.wait(0.001)  # time limit: of one question
    rank.watch.close()
    assert rank.losses.empty()
