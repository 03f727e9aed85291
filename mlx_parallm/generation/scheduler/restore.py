"""Prefixes that come back from stores: read before a sequence starts, filled once it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.fetches import ChainFetch
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.peer.prefill import Prompt
from mlx_parallm.generation.kv_cache.stored_chains import StoredChain
from mlx_parallm.generation.kv_cache.tiers import ArrivedBlock, Tiers
from mlx_parallm.generation.scheduler.running import RunningSet
from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.snapshotting import Snapshotter
from mlx_parallm.generation.scheduler.step_plan import StepPlan

# PATIENCE: times as long as computing takes here that another server may take to compute a prompt
# while streams run: they do not pause for it. If it is as fast as this one, sending may take as
# long as computing.
PATIENCE = 2.0

#: Gives a running sequence blocks for its next tokens; False if it was preempted for lack of them.
MakeRoom = Callable[[Sequence, int, StepPlan], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """A chain that another sequence reads, of which memory has what both need soon.

    Attributes:
        leader: that sequence.
        fetch: its chain.
        num_before: blocks before the chain's first one.
        kv: has the blocks.
    """

    leader: Sequence
    fetch: ChainFetch
    num_before: int
    kv: KVCacheManager

    def is_awaited(self, position: int) -> bool:
        """See ``Arrival``: the chain is being read, or its blocks cannot be found yet."""
        leader = self.leader
        del position
        if leader.slot is None:
            # What was read while a step is planned is used in the next one.
            return leader.fetch is self.fetch and self.fetch.num_chances <= 1
        table = leader.blocks
        return self.kv.is_current(table) and len(table.hashes) <= self.num_before


class Restorer:
    """Gives sequences the blocks and states that stores have of their prompts.

    No block is allocated, and no token counts as computed, before the bytes are in host memory and
    verified. What could not be read is computed. A state is filled behind all blocks before it; the
    sequence does not run before.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        tiers: Tiers,
        running: RunningSet,
        snapshotter: Snapshotter,
    ) -> None:
        self._kv = kv
        self._tiers = tiers
        self._running = running
        self._snapshotter = snapshotter
        # By the contents of their states, or the first ones of their chains.
        self._followed: dict[bytes, Followed] = {}

    @property
    def num_reserved(self) -> int:
        """Return how many free slots are kept for sequences whose blocks are read."""
        return self._tiers.fetches.num_reserved

    def reads(self, sequence: Sequence, table: BlockTable, known: list[int]) -> bool:
        """Begin to read what stores have behind a table's blocks; True if it has to be awaited.

        ``known``: those tokens of the sequence that may be cached, and one more.
        """
        if sequence.fetch is not None:
            return False
        sequence.arrivals.clear()
        assert self._kv.stored is not None, "stores are read"
        chain = self._kv.stored.find(table, known)
        if self._tiers.prefiller is not None:
            elsewhere = self._elsewhere(sequence, table, known, chain)
            if elsewhere is not None:
                patience = PATIENCE if self._has_streams else 1.0
                if self._begin(sequence, table, elsewhere, patience):
                    return sequence.is_blocked
                self._tiers.prefiller.count_declined("slow")
        return chain is not None and self._begin(sequence, table, chain) and sequence.is_blocked

    def _elsewhere(
        self, sequence: Sequence, table: BlockTable, known: list[int], chain: StoredChain | None
    ) -> StoredChain | None:
        """Return the chain of which another server is to compute the rest; None if it must not."""
        request, weights = sequence.request, sequence.group.weights.lasting_content
        if request.is_local or request.inputs or weights is None or table.tail:
            return None
        assert self._kv.stored is not None, "stores are read"
        prompt = Prompt(
            weights=weights,
            token_ids=known[:-1],
            scope=request.scope.owner,
            cache_salt=request.cache_salt,
            extra_key=request.extra_key,
        )
        return self._kv.stored.elsewhere(table, known, chain, prompt)

    def _begin(
        self, sequence: Sequence, table: BlockTable, chain: StoredChain, patience: float = 1.0
    ) -> bool:
        """Begin to read a chain, or await who reads it; False if it is likely to take too long."""
        if (followed := self._find_followed(chain)) is not None:
            sequence.arrivals.append(followed)
            return True
        fetches = self._tiers.fetches
        fetch = fetches.add(chain.runs, chain.num_tokens, chain.state, patience=patience)
        if fetch is None:
            return False
        sequence.fetch = fetch
        sequence.arrivals.append(fetch)
        self._followed[chain.key] = Followed(sequence, fetch, len(table.hashes), self._kv)
        return True

    def _find_followed(self, chain: StoredChain) -> Followed | None:
        """Return who reads a chain of which at least half are the leading blocks of this one.

        Several that begin with one text read it once, and share its blocks. With a state it must be
        that of the same prefix.
        """
        awaited = {key: each for key, each in self._followed.items() if each.is_awaited(0)}
        self._followed = awaited
        followed = awaited.get(chain.key)
        if followed is None or chain.state is not None:
            return followed
        pairs = zip(chain.contents, followed.fetch.contents, strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return followed if 2 * num_common >= followed.fetch.num_blocks else None

    def take(self, sequence: Sequence, known: list[int]) -> None:
        """Have blocks of a sequence that has started filled with what was read for it."""
        fetch, table = sequence.fetch, sequence.blocks
        if fetch is None:
            return
        num_had = len(table.blocks)
        arrived = self._kv.continue_stored(table, known, fetch, self._tiers.take(fetch))
        if not arrived:
            self._running.end_fetch(sequence)
            return
        sequence.arrived.extend(arrived)
        num_shared = len(table.blocks) - num_had
        sequence.num_computed += num_shared * self._kv.block_size
        # Only prompts count: looking up a sequence that was preempted is no query either.
        if not sequence.output_ids:
            self._count_hits(arrived, num_shared)

    def _count_hits(self, arrived: Iterable[ArrivedBlock], num_shared: int) -> None:
        """Count the blocks that a sequence is given; those of memory need the state of a store."""
        for block in arrived:
            num_blocks = num_shared if block.is_state else 1
            self._tiers.count_hit(block.tier, num_blocks * self._kv.block_size)

    def fill(self, plan: StepPlan, make_room: MakeRoom) -> None:
        """Plan to fill blocks of running sequences; their tokens count as computed then.

        Beside streams it is one piece, which takes a part of a step's time.
        """
        if not self._tiers.fetches:
            return
        filling = [
            sequence
            for sequence in self._running
            if sequence.arrived or (sequence.held is not None and sequence.held.is_filling)
        ]
        if not filling:
            return
        has_streams = self._has_streams
        limit = self._tiers.piece if has_streams else self._tiers.alone_piece
        for sequence in filling:
            if sequence.held is not None:
                plan.filled.update(sequence.held.fill(limit - len(plan.filled)))
            while sequence.arrived and len(plan.filled) < limit:
                if sequence.arrived[0].is_state:
                    if plan.filled_states and has_streams:
                        break
                    self._fill_state(sequence, plan)
                elif make_room(sequence, self._kv.block_size, plan):
                    self._fill_next(sequence, plan)
                else:
                    break
            if sequence.fetch is not None and not sequence.arrived:
                sequence.num_drafted = self._kv.count_drafted(sequence.blocks)
                self._running.end_fetch(sequence)

    @property
    def _has_streams(self) -> bool:
        return any(
            row.num_remaining == 1 and not row.arrived and not row.is_blocked
            for row in self._running
        )

    def _fill_next(self, sequence: Sequence, plan: StepPlan) -> None:
        arrived = sequence.arrived.popleft()
        sequence.num_computed += self._kv.block_size
        block = self._kv.filled_block(
            sequence.blocks, sequence.num_computed, is_drafted=arrived.is_drafted
        )
        plan.filled[block] = arrived.data
        plan.filling.add(sequence)

    def _fill_state(self, sequence: Sequence, plan: StepPlan) -> None:
        arrived = sequence.arrived.popleft()
        assert sequence.slot is not None, "only a running sequence has a state"
        self._snapshotter.keep_filled(sequence, arrived.prefix)
        plan.filled_states[sequence.slot] = arrived.data
        plan.filling.add(sequence)
