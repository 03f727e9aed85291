"""Reads from peers: whatever they answer, only the right blocks come, or fewer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest

from mlx_parallm.generation.kv_cache.peer import peers as peers_module
from mlx_parallm.generation.kv_cache.peer.link import LinkError
from mlx_parallm.generation.kv_cache.peer.peers import LOG_S, STALE_S, PeerFetch, Peers
from mlx_parallm.generation.kv_cache.peer.store import PeerStore
from tests.kv_disk import chain, contents, data
from tests.kv_peers import OWNER, UID, DictLink, listed, read

SIZE = 100
BLOCKS = chain("peer", 150, SIZE)
WANTED = contents(BLOCKS)
HERE = {block.content: block.data for block in BLOCKS}


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def peers_of(*links: DictLink, clock: Callable[[], float] = lambda: 0.0, **more: object) -> Peers:
    peers = Peers(listed(*links), OWNER, SIZE, clock=clock, **more)  # type: ignore[arg-type]
    asyncio.run(peers.refresh())
    return peers


def test_a_chain_comes_in_pieces_and_in_order() -> None:
    link = DictLink(HERE)
    peers = peers_of(link)
    assert read(peers, WANTED) == data(BLOCKS)
    assert [len(piece) for piece in link.pieces] == [8, 16, 32, 64, 30]
    assert (peers.num_read, peers.read_bytes) == (150, 150 * SIZE)
    assert not peers.counts
    assert not peers.problem


def test_the_peer_with_the_longest_beginning_is_asked() -> None:
    first = DictLink(dict(list(HERE.items())[:40]), "http://first:1")
    second = DictLink(dict(list(HERE.items())[:90]), "http://second:1")
    assert len(read(peers_of(first, second), WANTED)) == 90
    assert not first.pieces


def test_nobody_is_asked_for_what_no_filter_has() -> None:
    link = DictLink({})
    peers = peers_of(link)
    assert peers.find(WANTED) == (0, "")
    assert not link.pieces


def cut(answer: bytes) -> bytes:
    return answer[: len(answer) // 2]


def garbled(answer: bytes) -> bytes:
    return answer[:-1] + bytes([answer[-1] ^ 1])


def refused(_answer: bytes) -> bytes:
    raise LinkError("it refuses", "refused")


def silent(_answer: bytes) -> bytes:
    raise LinkError("it does not answer")


@pytest.mark.parametrize(
    ("fault", "least", "reason"),
    [
        (cut, 2, "damaged"),
        (garbled, 7, "damaged"),
        (lambda _: b"<html>nothing here</html>", 0, "damaged"),
        (lambda _: b"", 0, "damaged"),
        (lambda answer: answer[:24], 0, "missing"),
        (refused, 0, "refused"),
        (silent, 0, "unreachable"),
    ],
)
def test_a_faulty_answer_gives_its_leading_good_blocks(
    fault: Callable[[bytes], bytes],
    least: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Time()
    peers = peers_of(DictLink(HERE, fault=fault), clock=clock)
    for _ in range(3):
        blocks = read(peers, WANTED)
        assert blocks == data(BLOCKS)[: len(blocks)]
        assert least <= len(blocks) < 8
        assert peers.counts[reason] > 0
        # It is not asked before it has answered again.
        assert peers.find(WANTED) == (0, "")
        asyncio.run(peers.refresh())
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (reason != "missing")
    clock.now_s += LOG_S
    asyncio.run(peers.refresh())
    read(peers, WANTED)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2 * (reason != "missing")


class SlowLink(DictLink):
    """Answers never, or after a loop's clock has passed a time."""

    async def read_blocks(self, contents: Sequence[bytes]) -> bytes:
        if len(self.pieces) == 1:
            await asyncio.Event().wait()
        return await super().read_blocks(contents)


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer as soon as nothing else is to do."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            wait_s = self._scheduled[0].when() - self.time()  # type: ignore[attr-defined]
            self.skipped_s += max(0.0, wait_s)
        super()._run_once()  # type: ignore[misc]


def test_a_peer_that_stops_answering_gives_what_came_until_the_deadline() -> None:
    peers, fetch = peers_of(SlowLink(HERE)), PeerFetch()
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(peers.read("http://peer:1", WANTED, fetch))
        skipped_s = runner.get_loop().skipped_s  # type: ignore[attr-defined]
    assert fetch.is_done
    assert list(fetch.result()) == data(BLOCKS)[:8]
    assert peers.counts == {"late": 150 - 8}
    assert abs(skipped_s - peers_module.FETCH_S) < 1.0


def test_a_filter_that_never_comes_ends_the_refresh() -> None:
    class StuckLink(DictLink):
        async def read_filter(self) -> bytes:
            await asyncio.Event().wait()
            return b""

    peers = Peers(listed(StuckLink(HERE)), OWNER, SIZE)
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(peers.refresh())
    assert peers.problem == "it does not answer in time"


def test_a_block_that_is_missing_costs_the_peer_no_other(caplog: pytest.LogCaptureFixture) -> None:
    here = dict(HERE)
    peers = peers_of(link := DictLink(here))
    gone = WANTED[70]
    del here[gone]
    assert read(peers, WANTED) == data(BLOCKS)[:70]
    assert peers.find(WANTED) == (70, link.name)
    assert peers.find(WANTED[71:]) == (79, link.name)
    assert peers.counts == {"missing": 80}
    assert not caplog.records
    here[gone] = HERE[gone]
    asyncio.run(peers.refresh())
    assert read(peers, WANTED) == data(BLOCKS)


def test_asking_goes_on_after_any_failure(caplog: pytest.LogCaptureFixture) -> None:
    clock, link, failures = Time(), DictLink(HERE), 3

    async def list_links() -> Sequence[DictLink]:
        nonlocal failures
        if failures:
            failures -= 1
            raise UnicodeError("label empty or too long")
        return [link]

    async def pause(seconds: float) -> None:
        if not failures and peers.find(WANTED)[0]:
            raise asyncio.CancelledError
        clock.now_s += seconds

    peers = Peers(list_links, OWNER, SIZE, clock=clock)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(peers.keep_refreshing(pause))
    assert len(caplog.records) == 1
    assert peers.find(WANTED)[0] == 150


def test_a_stale_filter_counts_as_empty() -> None:
    clock = Time()
    peers = peers_of(DictLink(HERE), clock=clock)
    assert peers.find(WANTED)[0] == 150
    clock.now_s += STALE_S
    assert peers.find(WANTED) == (0, "")


def test_this_server_itself_is_no_peer() -> None:
    peers = peers_of(DictLink(HERE), uid=UID)
    assert peers.find(WANTED) == (0, "")
    assert peers.problem == "it is this server itself"


def test_a_peer_that_is_not_listed_any_more_is_not_asked() -> None:
    links = [DictLink(HERE)]

    async def list_links() -> Sequence[DictLink]:
        return links

    peers = Peers(list_links, OWNER, SIZE)
    asyncio.run(peers.refresh())
    assert peers.find(WANTED)[0] == 150
    links.clear()
    asyncio.run(peers.refresh())
    assert peers.find(WANTED) == (0, "")


@pytest.mark.parametrize("answer", [b"", b"no filter", UID, UID + b"\xff" * 70_000])
def test_what_is_no_filter_is_not_used(answer: bytes) -> None:
    class WrongLink(DictLink):
        async def read_filter(self) -> bytes:
            return answer

    assert peers_of(WrongLink(HERE)).find(WANTED) == (0, "")


async def close_nothing() -> None:
    """Close nothing."""


class TestStore:
    """The store runs its peers on a thread of its own."""

    def open(self, link: DictLink) -> PeerStore:
        async def close() -> None:
            self.is_closed = True

        self.is_closed = False
        self.peers = peers_of(link)
        return PeerStore(self.peers, close)

    def test_it_reads_and_keeps_nothing(self) -> None:
        with closing(self.open(DictLink(HERE))) as store:
            assert store.has(b"x" * 32)
            store.put(BLOCKS[0])
            assert store.find(WANTED) == 150
            fetch, missing = store.fetch(WANTED), store.fetch([b"x" * 32])
            assert missing.is_done
            while not fetch.is_done:
                pass
            assert list(fetch.result()) == data(BLOCKS)
            assert store.stats.read_blocks == 150
            store.clear()
        assert self.is_closed
        assert store.fetch(WANTED).is_done

    def test_each_peer_is_a_place_of_its_own(self) -> None:
        first = DictLink(dict(list(HERE.items())[:90]), "http://first:1")
        second = DictLink(dict(list(HERE.items())[90:]), "http://second:1")
        self.peers = peers_of(first, second)
        with closing(PeerStore(self.peers, close_nothing)) as store:
            places = [store.place(WANTED), store.place(WANTED[90:])]
            assert places == ["peer http://first:1", "peer http://second:1"]

    def test_a_cancelled_fetch_ends(self) -> None:
        with closing(self.open(SlowLink(HERE))) as store:
            fetch = store.fetch(WANTED)
            while not fetch.result():
                pass
            fetch.cancel()
            while not fetch.is_done:
                pass
            assert list(fetch.result()) == data(BLOCKS)[:8]
            # A fetch that was cancelled is no fault of the peer.
            assert not store.stats.discarded
