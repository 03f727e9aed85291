"""The servers that may have blocks of a model: what they may have, and reads of it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_parallm.generation.kv_cache.peer.exports import MAX_BLOCKS, MAX_BYTES
from mlx_parallm.generation.kv_cache.peer.filters import FILTER_BYTES, UID_BYTES, ContentFilter
from mlx_parallm.generation.kv_cache.peer.frames import BadFramesError, unpack_frames
from mlx_parallm.generation.kv_cache.peer.link import Link, LinkError
from mlx_parallm.types.content import Buffer

logger = logging.getLogger(__name__)

#: ``REFRESH_S``: seconds between two readings of a peer's filter.
REFRESH_S = 5.0
# STALE_S: an older filter counts as empty.
STALE_S = 4 * REFRESH_S
# FETCH_S: most seconds of a fetch.
FETCH_S = 10.0
# STUCK_S: a peer that has not answered for so long is not asked for more.
STUCK_S = 2.0
# LOG_S: a peer's problems are logged once in such a time.
LOG_S = 60.0
# AHEAD: pieces of a chain that are asked for at once, so that one is read while another is sent.
AHEAD = 2
# FIRST_PIECE: blocks of the first piece of a chain.
FIRST_PIECE = 8

#: ``Links``: returns the ways to all peers that are listed now.
Links = Callable[[], Awaitable[Sequence[Link]]]


@dataclass(eq=False)
class PeerFetch:
    """Implements ``Fetch``: the event loop adds blocks that a peer sends, any thread may see them.

    Attributes:
        blocks: those that came, in order, verified.
        is_done: True once no more come.
        stop: ends the reading; any thread may call it.
    """

    blocks: list[Buffer] = field(default_factory=list[Buffer])
    is_done: bool = False
    stop: Callable[[], object] = lambda: None

    def result(self) -> Sequence[Buffer]:
        """See ``Fetch``."""
        return list(self.blocks)

    def cancel(self) -> None:
        """See ``Fetch``."""
        self.stop()


@dataclass(eq=False)
class _Peer:
    """One peer.

    Attributes:
        link: asks it.
        filter: what it may have.
        missing: contents that it has not, although they are in the filter.
        seen_s: when that was read.
        open: when the latest piece of each fetch was asked for.
        problem: why it was not of use the last time; empty if it was.
        logged_s: when that was logged.
    """

    link: Link
    filter: ContentFilter = field(default_factory=ContentFilter)
    missing: set[bytes] = field(default_factory=set[bytes])
    seen_s: float = 0.0
    open: dict[PeerFetch, float] = field(default_factory=dict[PeerFetch, float])
    problem: str = ""
    logged_s: float = -LOG_S


class Peers:
    """Peers by name. ``find`` and ``fetch`` may be called on any thread, all else on the loop's.

    Attributes:
        counts: blocks that were asked for and did not come, by reason.
        num_read: blocks that came.
        read_bytes: their bytes.
    """

    def __init__(
        self,
        links: Links,
        owner: str,
        num_bytes: int,
        *,
        uid: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare.

        Args:
            links: see ``Links``.
            owner: digest of the model's ``Identity``.
            num_bytes: the size of each block.
            uid: that of this server, which is not asked; empty if it answers no peers.
            clock: returns seconds.
            wake: is called when a fetch is done, or has a further part.
        """
        self._links = links
        self._owner = owner
        self._num_bytes = num_bytes
        self._uid = uid
        self._clock = clock
        self.wake = wake
        self._piece = max(1, min(MAX_BLOCKS, MAX_BYTES // num_bytes))
        self._peers: dict[str, _Peer] = {}
        self._logged_s = -math.inf
        self.counts: Counter[str] = Counter()
        self.num_read = self.read_bytes = 0

    def find(self, contents: Sequence[bytes]) -> tuple[int, str]:
        """Return how many leading contents a peer may have, and the name of the one with most."""
        now_s = self._clock()
        counts = [
            (_count(peer, contents), name)
            for name, peer in list(self._peers.items())
            if now_s - peer.seen_s < STALE_S and not _is_stuck(peer, now_s)
        ]
        best = max(counts, default=(0, ""))
        return best if best[0] else (0, "")

    @property
    def num_blocks(self) -> int:
        """Return about how many blocks the peer has that has most."""
        return max((peer.filter.size for peer in list(self._peers.values())), default=0)

    @property
    def problem(self) -> str:
        """Return why no peer is asked; empty if one may be."""
        peers = list(self._peers.values())
        problems = [peer.problem for peer in peers if peer.problem]
        if len(problems) < len(peers):
            return ""
        return problems[0] if problems else "no peer has answered"

    def clear(self) -> None:
        """Ask for nothing before the next ``refresh``."""
        for peer in list(self._peers.values()):
            peer.filter = ContentFilter()
            peer.missing.clear()

    async def keep_refreshing(self, pause: Callable[[float], Awaitable[None]]) -> None:
        """Read filters until it is cancelled; ``pause`` waits for some seconds."""
        while True:
            try:
                await self.refresh()
            except Exception as problem:  # noqa: BLE001 - asking goes on, whatever it was
                self._log_failure(problem)
            await pause(REFRESH_S)

    def _log_failure(self, problem: Exception) -> None:
        """Log that no peer could be asked, if that was not done lately."""
        now_s = self._clock()
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            logger.error("peers could not be asked for KV", exc_info=problem)

    async def refresh(self) -> None:
        """Read the filters of all peers that are listed now."""
        links = {link.name: link for link in await self._links()}
        for name in self._peers.keys() - links.keys():
            del self._peers[name]
        for name, link in links.items():
            self._peers.setdefault(name, _Peer(link)).link = link
        await asyncio.gather(*(self._refresh(peer) for peer in list(self._peers.values())))

    async def _refresh(self, peer: _Peer) -> None:
        try:
            async with asyncio.timeout(REFRESH_S):
                answer = await peer.link.read_filter()
        except (LinkError, TimeoutError) as problem:
            self._note(peer, str(problem) or "it does not answer in time")
            return
        if len(answer) != UID_BYTES + FILTER_BYTES:
            self._note(peer, "it answers with something else than a filter")
        elif answer[:UID_BYTES] == self._uid:
            self._note(peer, "it is this server itself")
        else:
            peer.missing.clear()
            peer.filter, peer.seen_s = ContentFilter(answer[UID_BYTES:]), self._clock()
            peer.problem = ""

    async def read(self, name: str, contents: Sequence[bytes], fetch: PeerFetch) -> None:
        """Read blocks of a chain; the leading ones that come are the result."""
        peer = self._peers.get(name)
        try:
            if peer is not None:
                async with asyncio.timeout(FETCH_S):
                    await self._read(peer, contents, fetch)
        except TimeoutError:
            self._lose(peer, "late", len(contents) - len(fetch.blocks), "it is slow")
        except LinkError as problem:
            self._lose(peer, problem.reason, len(contents) - len(fetch.blocks), str(problem))
        except BadFramesError as problem:
            self._lose(peer, "damaged", len(contents) - len(fetch.blocks), str(problem))
        finally:
            fetch.is_done = True
            self.wake()

    async def _read(self, peer: _Peer, contents: Sequence[bytes], fetch: PeerFetch) -> None:
        waiting = deque(_pieces(contents, self._piece))
        begun = deque[tuple[Sequence[bytes], asyncio.Task[bytes]]]()
        try:
            while waiting or begun:
                while waiting and len(begun) < AHEAD:
                    piece = waiting.popleft()
                    begun.append((piece, asyncio.create_task(_blocks_of(peer.link, piece))))
                piece, task = begun[0]
                peer.open[fetch] = self._clock()
                answer = await task
                begun.popleft()
                count = self._add(answer, piece, fetch)
                self.wake()
                if count < len(piece):
                    # The filter may be wrong about it, and right about all others.
                    peer.missing.add(piece[count])
                    self.counts["missing"] += len(contents) - len(fetch.blocks)
                    return
        finally:
            del peer.open[fetch]
            for _, task in begun:
                task.cancel()

    def _add(self, answer: bytes, piece: Sequence[bytes], fetch: PeerFetch) -> int:
        """Add the blocks of an answer to a fetch; return how many there are."""
        count = 0
        for block in unpack_frames(answer, self._owner, piece, self._num_bytes):
            fetch.blocks.append(block)
            self.num_read += 1
            self.read_bytes += len(block)
            count += 1
        return count

    def _lose(self, peer: _Peer | None, reason: str, count: int, problem: str) -> None:
        """Count blocks that do not come, and ask the peer for nothing before the next refresh."""
        self.counts[reason] += count
        if peer is not None:
            peer.filter = ContentFilter()
            self._note(peer, problem)

    def _note(self, peer: _Peer, problem: str) -> None:
        """Note why a peer is of no use now, and log it if that was not done lately."""
        peer.problem = problem
        now_s = self._clock()
        if now_s - peer.logged_s >= LOG_S:
            peer.logged_s = now_s
            logger.warning("no KV comes from %s: %s", peer.link.name, problem)


async def _blocks_of(link: Link, piece: Sequence[bytes]) -> bytes:
    return await link.read_blocks(piece)


def _pieces(contents: Sequence[bytes], most: int) -> Iterator[Sequence[bytes]]:
    """Yield consecutive pieces, each up to twice as large as the one before.

    The first ones soon show how fast the link is.
    """
    start, size = 0, min(FIRST_PIECE, most)
    while start < len(contents):
        yield contents[start : start + size]
        start += size
        size = min(2 * size, most)


def _count(peer: _Peer, contents: Sequence[bytes]) -> int:
    for number, content in enumerate(contents):
        if content not in peer.filter or content in peer.missing:
            return number
    return len(contents)


def _is_stuck(peer: _Peer, now_s: float) -> bool:
    return any(now_s - asked_s > STUCK_S for asked_s in list(peer.open.values()))
