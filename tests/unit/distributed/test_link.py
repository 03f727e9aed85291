"""Followers get all of rank 0's messages in order, and know its death from its goodbye."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from mlx_parallm.distributed.addresses import LOOPBACK, Offer, listen
from mlx_parallm.distributed.link import FollowerLink, LeaderLink, Message
from mlx_parallm.peers.channel import UnreadableError
from mlx_parallm.types.errors import ConfigError, ControlError, RankLostError
from tests.fake_ranks import PATIENCE_S, FakeRanks, fake_ranks

Star = tuple[LeaderLink, list[FollowerLink]]


class Unreadable:
    """It can be pickled, and not be read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (int, ("not a number",))


def open_all(
    threads: ThreadPoolExecutor, size: int, host: str | None = LOOPBACK
) -> tuple[Future[LeaderLink], list[Future[FollowerLink]]]:
    """Open all ends of a link at once."""
    leader, *followers = fake_ranks(size)
    return (
        threads.submit(LeaderLink.open, leader, host, PATIENCE_S, environment={}),
        [threads.submit(FollowerLink.open, ranks, PATIENCE_S) for ranks in followers],
    )


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.fixture
def star(threads: ThreadPoolExecutor) -> Iterator[Star]:
    leader, followers = open_all(threads, 3)
    link, links = leader.result(), [follower.result() for follower in followers]
    yield link, links
    for follower in links:
        follower.close()
        follower.beats.close()
    link.close(goodbye=False)
    for end in link.beats.values():
        end.close()


def test_messages_come_in_order_and_whole(star: Star, threads: ThreadPoolExecutor) -> None:
    link, followers = star
    large = np.arange(1 << 18, dtype=np.float32)

    def send_all() -> list[int]:
        return [link.send(1, b"batch"), link.send(2, {"weights": large}), link.send(3, None)]

    sent = threads.submit(send_all)
    for follower in followers:
        assert follower.receive() == Message(1, b"batch", 1)
        message = follower.receive()
        assert message is not None
        assert (message.kind, message.number) == (2, 2)
        assert (message.payload["weights"] == large).all()
        assert follower.receive() == Message(3, None, 3)
    assert sent.result() == [1, 2, 3]
    assert link.num_messages == 3
    assert link.num_bytes > large.nbytes


def test_replies_are_sorted_by_rank_and_message(star: Star) -> None:
    link, (first, second) = star
    early, late = link.send(1, "a"), link.send(1, "b")
    for follower, numbers in ((first, [late, early]), (second, [early, late])):
        for number in numbers:
            follower.reply(number, (follower.rank, number))
    assert link.replies(early, PATIENCE_S) == [(1, early), (2, early)]
    assert link.replies(late, PATIENCE_S) == [(1, late), (2, late)]


def test_the_beats_are_streams_of_their_own(star: Star) -> None:
    link, followers = star
    assert list(link.beats) == [1, 2]
    for follower in followers:
        follower.beats.sendall(b"%d" % follower.rank)
        assert link.beats[follower.rank].recv(9) == b"%d" % follower.rank


def test_a_goodbye_ends_the_log(star: Star, threads: ThreadPoolExecutor) -> None:
    link, followers = star
    link.send(1, "last")
    closed = threads.submit(link.close)
    for follower in followers:
        assert follower.receive() == Message(1, "last", 1)
        assert follower.receive() is None
        follower.close()
    closed.result()


def test_a_log_that_ends_without_a_goodbye_is_a_loss(star: Star) -> None:
    link, followers = star
    link.send(1, "last")
    link.close(goodbye=False)
    for follower in followers:
        assert follower.receive() == Message(1, "last", 1)
        with pytest.raises(RankLostError, match="Rank 0 is gone") as lost:
            follower.receive()
        assert lost.value.rank == 0


def send_until_it_fails(link: LeaderLink, reader: FollowerLink) -> None:
    """Send what the kernel takes for a connection that has ended, while one follower reads."""
    for _ in range(1000):
        link.send(1, bytes(1000))
        reader.receive()


def test_a_follower_that_is_gone_is_named(star: Star) -> None:
    link, (first, second) = star
    number = link.send(1, "a")
    first.reply(number, "yes")
    second.close()
    with pytest.raises(RankLostError, match="Rank 2 is gone") as lost:
        link.replies(number)
    assert lost.value.rank == 2
    with pytest.raises(RankLostError, match="Rank 2 is gone"):
        send_until_it_fails(link, first)


def test_a_follower_that_does_not_reply_is_named(star: Star) -> None:
    link, (first, _) = star
    number = link.send(1, "a")
    first.reply(number, "yes")
    with pytest.raises(RankLostError, match=r"Rank 2 .* has not replied within 0\.01 s"):
        link.replies(number, 0.01)


def test_an_abort_wakes_who_waits(star: Star, threads: ThreadPoolExecutor) -> None:
    link, followers = star
    number = link.send(1, "a")
    replies = threads.submit(link.replies, number)
    for follower in followers:
        follower.receive()
    messages = threads.submit(followers[0].receive)
    followers[0].abort()
    link.abort()
    for waiting in (replies, messages):
        with pytest.raises(RankLostError):
            waiting.result(PATIENCE_S)


def test_what_cannot_be_pickled_is_not_sent(star: Star) -> None:
    link, followers = star
    with pytest.raises(ControlError, match="cannot be pickled"):
        link.send(1, lambda: None)
    link.send(1, "next")
    assert followers[0].receive() == Message(1, "next", 1)
    with pytest.raises(ControlError, match="cannot be pickled"):
        followers[0].reply(1, lambda: None)
    for follower in followers:
        follower.reply(1, "yes")
    assert link.replies(1) == ["yes", "yes"]


def test_an_unreadable_message_is_passed_over(star: Star) -> None:
    link, followers = star
    link.send(1, Unreadable())
    link.send(1, "next")
    with pytest.raises(UnreadableError, match="cannot be read here"):
        followers[0].receive()
    assert followers[0].receive() == Message(1, "next", 2)


def test_ranks_join_at_addresses_of_the_machine(threads: ThreadPoolExecutor) -> None:
    leader, followers = open_all(threads, 2, host=None)
    link, follower = leader.result(), followers[0].result()
    link.send(1, "a")
    assert follower.receive() == Message(1, "a", 1)
    follower.close()
    link.close(goodbye=False)
    for end in (follower.beats, *link.beats.values()):
        end.close()


def test_all_ranks_learn_that_rank_0_cannot_listen(threads: ThreadPoolExecutor) -> None:
    with listen(Offer((LOOPBACK,), is_explicit=True)) as taken:
        leader, follower = fake_ranks(2)
        joined = threads.submit(FollowerLink.open, follower, PATIENCE_S)
        with pytest.raises(ConfigError, match="cannot listen"):
            LeaderLink.open(leader, LOOPBACK, PATIENCE_S, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            joined.result()


def told_to(hosts: list[str], port: int) -> FakeRanks:
    """Return a follower that gets these addresses."""
    leader, follower = fake_ranks(2)
    where = {"hosts": hosts, "port": port, "secret": bytes(32).hex()}
    leader.broadcast(json.dumps(where).encode())
    return follower


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as free:
        return free.getsockname()[1]


def test_addresses_that_refuse_are_named() -> None:
    port = free_port()
    pattern = rf"Rank 1 cannot reach rank 0 \(127\.0\.0\.1:{port}: .*; localhost:{port}: "
    with pytest.raises(ConfigError, match=pattern):
        FollowerLink.open(told_to([LOOPBACK, "localhost"], port), 5.0)


def test_somebody_else_at_the_address_is_no_rank_0(threads: ThreadPoolExecutor) -> None:
    def answer() -> None:
        with listener.accept()[0] as end:
            end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
            end.recv(1 << 10)

    with socket.create_server((LOOPBACK, 0)) as listener:
        answered = threads.submit(answer)
        with pytest.raises(ConfigError, match="does not know the secret"):
            FollowerLink.open(told_to([LOOPBACK], listener.getsockname()[1]), PATIENCE_S)
        answered.result()
