"""The stores below a model's block pool: what they have, what they get, and what is being read."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mlx_parallm.generation.kv_cache.fetches import ChainFetch, FetchQueue, Run
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.peer.prefill import TIER, Prefiller, PrefillStats
from mlx_parallm.generation.kv_cache.saves import SaveQueue
from mlx_parallm.generation.kv_cache.stores import BlockStore, StoredBlock, StoreStats
from mlx_parallm.types.content import Buffer, PendingContent, digest_of
from mlx_parallm.types.step import Moves

#: ``MIN_SAVED_BLOCKS``: a shorter chain is computed again soon enough, and saved once it has grown.
MIN_SAVED_BLOCKS = 16
#: ``MIN_FETCHED_BLOCKS``: fewer are computed rather than read.
MIN_FETCHED_BLOCKS = 4
# PIECE, PIECE_AHEAD: blocks that are filled, or saved, before a step for which streams wait. On a
# CPU 16 take 7 ms. A GPU computes meanwhile: 64 blocks of 2 MiB take 5 ms on an H200, less than a
# step of 32 streams.
PIECE, PIECE_AHEAD = 16, 64
# ALONE: how many times more they are if no stream waits.
ALONE = 4
# PLAIN, DRAFTED: the last byte of a stored block where there is a draft model.
PLAIN, DRAFTED = b"\0", b"\1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One store.

    Attributes:
        tier: its name.
        hit_tokens: prompt tokens whose KV came from it.
        store: its state and its counters.
    """

    tier: str
    hit_tokens: int = 0
    store: StoreStats = field(default_factory=StoreStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersStats:
    """All stores of a model.

    Attributes:
        tiers: each store, nearest first.
        num_reads: chains that were read or given up.
        num_late: how many were given up.
        wait_s: seconds that sequences waited for them together.
        num_unsaved: blocks that wait to be saved.
        prefill: prompts that another server computed; None if none does.
    """

    tiers: tuple[TierStats, ...] = ()
    num_reads: int = 0
    num_late: int = 0
    wait_s: float = 0.0
    num_unsaved: int = 0
    prefill: PrefillStats | None = None

    @property
    def hit_tokens(self) -> int:
        """The prompt tokens whose KV came from any of them, or from the server that computes."""
        elsewhere = 0 if self.prefill is None else self.prefill.hit_tokens
        return elsewhere + sum(tier.hit_tokens for tier in self.tiers)


@dataclass(frozen=True, slots=True)
class ArrivedBlock:
    """A block, or the state at the end of a chain, that a store returned, verified.

    Attributes:
        data: its bytes, as ``ReadBlocks`` or ``ReadStates`` returned them.
        is_drafted: True if a draft model's KV is among them.
        tier: the store's name.
        is_state: True for a state.
        prefix: the content, in memory, of the block before a state.
    """

    data: Buffer
    is_drafted: bool
    tier: str
    is_state: bool = False
    prefix: bytes = b""


class Tiers:
    """The stores of one model. It lives on the engine thread.

    Attributes:
        saves: the blocks that stores are to get.
        fetches: the chains that are being read.
        exports: answers other servers' requests for blocks; None if they may have none.
        prefiller: has long prompts computed by another server; None if none does.
        min_saved: blocks of the shortest chain that is saved.
        min_fetched: blocks of the shortest chain that is read.
        piece: blocks that are filled, or saved, before a step for which streams wait.
        alone_piece: likewise if none waits.
        state_size: how many blocks have as many bytes as a state; 0 for models without one.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        stores: Sequence[BlockStore],
        *,
        block_bytes: int,
        state_bytes: int = 0,
        draft: PendingContent | None = None,
        exports: Exports | None = None,
        runs_ahead: bool = False,
        min_saved: int = MIN_SAVED_BLOCKS,
        min_fetched: int = MIN_FETCHED_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            stores: nearest first.
            block_bytes: size of a block in the pool.
            state_bytes: size of a sequence's state; 0 for models without one.
            draft: the lasting content of the draft model; None without one.
            exports: see the attributes.
            runs_ahead: whether the device computes steps while blocks are moved.
            min_saved: see the attributes.
            min_fetched: likewise.
            clock: returns seconds.
        """
        self.saves = SaveQueue()
        self.fetches = FetchQueue(block_bytes, clock)
        self.piece = PIECE_AHEAD if runs_ahead else PIECE
        self.alone_piece = ALONE * self.piece
        self.min_saved = min_saved
        self.min_fetched = min_fetched
        self.state_size = -(-state_bytes // block_bytes)
        self.exports = exports
        self.prefiller: Prefiller | None = None
        self._stores = stores
        self._block_bytes = block_bytes
        self._draft = draft
        self._hit_tokens: Counter[str] = Counter()

    def salt(self, lasting_salt: bytes | None) -> bytes | None:
        """Return a lasting salt with the draft model, whose KV blocks hold too; None if unknown."""
        if lasting_salt is None or self._draft is None:
            return lasting_salt
        digest = self._draft.digest
        return None if digest is None else digest_of("draft", lasting_salt, digest).encode()

    def wake_by(self, wake: Callable[[], None]) -> None:
        """See ``BlockStore``."""

        def note_and_wake() -> None:
            self.fetches.note_done()
            wake()

        for store in self._stores:
            store.wake_by(note_and_wake)
        if self.exports is not None:
            self.exports.wake = wake
        if self.prefiller is not None:
            self.prefiller.wake = note_and_wake

    @property
    def own_stores(self) -> Sequence[BlockStore]:
        """Return those whose blocks are on this machine."""
        return [store for store in self._stores if store.is_own]

    @property
    def has_asked(self) -> bool:
        """True if ``answer_peers`` would do something."""
        return self.exports is not None and self.exports.has_work

    def answer_peers(self) -> None:
        """Go on with what other servers have asked for; called between two steps."""
        if self.exports is not None and self.exports.has_work:
            self.exports.advance()

    @property
    def is_busy(self) -> bool:
        """True if a store would discard blocks that it is given."""
        return any(store.is_busy for store in self._stores)

    @property
    def can_save(self) -> bool:
        """True if a step could read blocks that wait for it."""
        return len(self.saves) > 0 and (not self.is_busy or self.saves.has_unkept)

    @property
    def room(self) -> float:
        """Return how many blocks may be saved now, besides those that steps in flight save."""
        if self.is_busy:
            return 0
        room_bytes = min((store.room_bytes for store in self._stores), default=math.inf)
        if room_bytes == math.inf:
            return math.inf
        return room_bytes // self._block_bytes - self.saves.begun_size

    def use(self, contents: Sequence[bytes]) -> None:
        """Count the leading blocks of a chain as used."""
        for store in self._stores:
            store.use(contents)

    def lacks(self, content: bytes) -> bool:
        """True if a store should get a block, which does not wait to be saved already."""
        if self.saves.keeps(content):
            return False
        return not all(store.has(content) for store in self._stores)

    def find(self, contents: Sequence[bytes]) -> Sequence[Run]:
        """Return the runs of the longest prefix of a chain that is here."""
        runs: list[Run] = []
        start = 0
        while start < len(contents):
            rest = contents[start:] if start else contents
            counts = ((store, store.find(rest)) for store in self._stores)
            store, count = next(((store, n) for store, n in counts if n), (None, 0))
            if store is None:
                break
            runs.append(Run(store, rest[:count]))
            start += count
        return runs

    def find_state(self, content: bytes) -> Run | None:
        """Return the state of this content as the nearest store has it; None if none does."""
        store = next((store for store in self._stores if store.find([content])), None)
        return None if store is None else Run(store, [content], self.state_size)

    def put(self, content: bytes, data: Buffer) -> None:
        """Give the stores that lack it a block that was read for them, behind what it follows."""
        for save, each in self.saves.end(content, data):
            if self._draft is not None and not save.is_state:
                each = b"".join((each, DRAFTED if save.is_drafted else PLAIN))
            block = StoredBlock(
                content=save.content, parent=save.parent, data=each, is_state=save.is_state
            )
            for store in self._stores if save.is_kept else ():
                if not store.has(save.content):
                    store.put(block)
            if self.exports is not None:
                self.exports.put(save.content, each)

    def take(self, fetch: ChainFetch) -> list[ArrivedBlock]:
        """Return the blocks of a chain that arrived, and its state behind them, if it has one.

        ``fetches.release`` must follow.
        """
        arrived, state = self.fetches.take(fetch), list[ArrivedBlock]()
        if self.prefiller is not None and any(run.store.tier == TIER for run in fetch.runs):
            self.prefiller.used += any(tier == TIER for _, tier in arrived)
            if not fetch.is_done:
                self.prefiller.count_declined("late")
        if arrived and fetch.state is not None:
            data, tier = arrived.pop()
            state.append(ArrivedBlock(data, False, tier, is_state=True))
        if self._draft is None:
            return [ArrivedBlock(data, False, tier) for data, tier in arrived] + state
        blocks = [ArrivedBlock(data[:-1], data[-1:] == DRAFTED, tier) for data, tier in arrived]
        return blocks + state

    def count_hit(self, tier: str, num_tokens: int) -> None:
        """Count tokens of a prompt, or of a source, that a sequence need not compute."""
        self._hit_tokens[tier] += num_tokens

    def add_saves(self, moves: Moves, num_computed: int = 0, *, is_alone: bool = False) -> Moves:
        """Return the moves of the next step with what is saved: what leaves, others as room allows.

        Saves keep up with prefill: a step saves as many blocks as it computes, ``num_computed``, or
        a piece. ``is_alone``: it computes nothing. Stores that are given more than they have room
        for would lose the end of a chain.
        """
        if not self.saves:
            return moves
        piece = self.alone_piece if is_alone else max(self.piece, num_computed)
        pairs: dict[bool, list[tuple[int, bytes]]] = {False: [], True: []}
        for save in self.saves.take(piece, self.room):
            pairs[save.is_state].append((save.place, save.content))
        return replace(moves, saved=tuple(pairs[False]), saved_states=tuple(pairs[True]))

    def clear(self) -> None:
        """Forget all, with what is being read of it and what was to be saved."""
        self.saves.clear()
        self.fetches.drop_all()
        for store in self._stores:
            store.clear()

    def close(self) -> None:
        """End the stores."""
        for store in self._stores:
            store.close()
        if self.prefiller is not None:
            self.prefiller.close()

    def check_integrity(self, fetches: Sequence[ChainFetch]) -> None:
        """Assert that these chains, and no others, are read or held for sequences."""
        self.fetches.check_integrity(fetches)

    def stats(self) -> TiersStats:
        """Return their state."""
        return TiersStats(
            tiers=tuple(
                TierStats(
                    tier=store.tier,
                    hit_tokens=self._hit_tokens[store.tier],
                    store=store.stats,
                )
                for store in self._stores
            ),
            num_reads=self.fetches.num_reads,
            num_late=self.fetches.num_late,
            wait_s=self.fetches.wait_s,
            num_unsaved=len(self.saves),
            prefill=self._prefill_stats(),
        )

    def _prefill_stats(self) -> PrefillStats | None:
        if self.prefiller is None:
            return None
        return PrefillStats(
            used=self.prefiller.used,
            hit_tokens=self._hit_tokens[TIER],
            declined=dict(self.prefiller.declined),
        )
