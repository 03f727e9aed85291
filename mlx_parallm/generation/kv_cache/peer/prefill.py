"""Prompts that another server computes: their blocks come while it goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from mlx_parallm.generation.kv_cache.peer.exports import ANSWER_S, MAX_BLOCKS
from mlx_parallm.generation.kv_cache.peer.frames import BadFramesError, unpack_frames
from mlx_parallm.generation.kv_cache.peer.link import LinkError
from mlx_parallm.generation.kv_cache.peer.peers import LOG_S, PeerFetch
from mlx_parallm.generation.kv_cache.peer.thread import PeerThread
from mlx_parallm.generation.kv_cache.stores import BlockStore, Fetch, StoredBlock, StoreStats

logger = logging.getLogger(__name__)

#: ``TIER``: what blocks from such a peer are called in metrics.
TIER = "prefill"
# REST_S: seconds in which a peer is not asked again after it was of no use.
REST_S = 5.0
# LATE_S: an answer without blocks that took so long says that none of them is computed yet.
LATE_S = ANSWER_S / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokens whose KV another server is to compute, and all that it depends on.

    Attributes:
        weights: the lasting content of the weights and the adapter.
        token_ids: the tokens.
        scope: the only client whose requests may reuse the KV; None: every client's may.
        cache_salt: see ``GenerateRequest``.
        extra_key: likewise.
    """

    weights: str
    token_ids: Sequence[int]
    scope: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStats:
    """Prompts that another server computed, or did not.

    Attributes:
        used: prompts of which blocks came.
        hit_tokens: tokens of these that were not computed here.
        declined: prompts that were computed here, by reason.
    """

    used: int = 0
    hit_tokens: int = 0
    declined: Mapping[str, int] = field(default_factory=dict[str, int])


class PrefillLink(Protocol):
    """Asks one server to compute prompts of one model, on an event loop.

    Attributes:
        name: of the server, as logs have it.
    """

    name: str

    async def prefill(self, prompt: Prompt) -> None:
        """Return once a prompt is computed.

        Raises:
            LinkError: it refuses, or does not answer.
        """
        ...

    async def await_blocks(self, contents: Sequence[bytes]) -> bytes:
        """Return the frames of leading ones of these contents, once the first is computed.

        Raises:
            LinkError: it does not answer.
        """
        ...


class Prefiller:
    """Has long prompts computed by another server, where that is faster.

    Attributes:
        min_tokens: fewer are computed here.
        used: see ``PrefillStats``.
        declined: likewise.
        wake: is called when a prompt, or a part of it, is there.
    """

    def __init__(
        self,
        link: PrefillLink,
        thread: PeerThread,
        *,
        owner: str,
        num_bytes: int,
        min_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            link: asks the server.
            thread: asks it.
            owner: digest of the model's ``Identity``.
            num_bytes: the size of each block.
            min_tokens: see the attributes.
            clock: returns seconds.
        """
        self.min_tokens = min_tokens
        self.used = 0
        self.declined: Counter[str] = Counter()
        self.wake: Callable[[], None] = lambda: None
        self._link = link
        self._owner = owner
        self._num_bytes = num_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._rests_until_s = self._logged_s = -LOG_S
        self._thread = thread

    def offer(self, prompt: Prompt) -> BlockStore | None:
        """Return a store that has a prompt's blocks computed; None if they are computed here."""
        if self._clock() < self._rests_until_s:
            self.count_declined("resting")
            return None
        return _OfferedPrompt(self, prompt)

    def fetch(self, prompt: Prompt, contents: Sequence[bytes]) -> PeerFetch:
        """Begin to have a prompt computed; return what gets its blocks."""
        fetch = PeerFetch()
        return self._thread.read(self.read(prompt, contents, fetch), fetch)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    async def read(self, prompt: Prompt, contents: Sequence[bytes], fetch: PeerFetch) -> None:
        """Have a prompt computed, and read its blocks as they are; leading ones are the result."""
        computing = asyncio.create_task(self._compute(prompt))
        try:
            await self._read(computing, contents, fetch)
        except LinkError as problem:
            self._decline(problem.reason, str(problem))
        except BadFramesError as problem:
            self._decline("damaged", str(problem))
        finally:
            computing.cancel()
            fetch.is_done = True
            self.wake()

    async def _compute(self, prompt: Prompt) -> None:
        await self._link.prefill(prompt)

    async def _read(
        self, computing: asyncio.Task[None], contents: Sequence[bytes], fetch: PeerFetch
    ) -> None:
        blocks = fetch.blocks
        while len(blocks) < len(contents):
            piece = contents[len(blocks) : len(blocks) + MAX_BLOCKS]
            asked_s = self._clock()
            reading = asyncio.ensure_future(self._link.await_blocks(piece))
            try:
                await asyncio.wait({reading, computing}, return_when=asyncio.FIRST_COMPLETED)
                if computing.done():
                    # Raises what refused it: then no more is to come.
                    computing.result()
                answer = await reading
            finally:
                reading.cancel()
            before = len(blocks)
            blocks.extend(unpack_frames(answer, self._owner, piece, self._num_bytes))
            self.wake()
            # An answer without blocks is late if the peer still computes the first of them.
            is_late = self._clock() - asked_s >= LATE_S and not computing.done()
            if len(blocks) == before and not is_late:
                self._decline("missing", "it has not computed what it was asked for")
                return

    def count_declined(self, reason: str) -> None:
        """Count a prompt that is computed here at least in part; any thread may call it."""
        with self._lock:
            self.declined[reason] += 1

    def _decline(self, reason: str, problem: str) -> None:
        self.count_declined(reason)
        now_s = self._clock()
        self._rests_until_s = now_s + REST_S
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            logger.warning("%s computes no prompts: %s", self._link.name, problem)


class _OfferedPrompt(BlockStore):
    """The blocks of one prompt, as those of a store; nothing is sent before they are fetched."""

    tier = TIER
    is_own = False
    gives_parts = True

    def __init__(self, prefiller: Prefiller, prompt: Prompt) -> None:
        self._prefiller = prefiller
        self._prompt = prompt

    @override
    def find(self, contents: Sequence[bytes]) -> int:
        return 0

    @override
    def fetch(self, contents: Sequence[bytes]) -> Fetch:
        return self._prefiller.fetch(self._prompt, contents)

    @override
    def put(self, block: StoredBlock) -> None:
        """Keep nothing."""

    @override
    def has(self, content: bytes) -> bool:
        return True

    @override
    def clear(self) -> None:
        """Forget nothing: nothing is kept."""

    @property
    @override
    def stats(self) -> StoreStats:
        return StoreStats()
