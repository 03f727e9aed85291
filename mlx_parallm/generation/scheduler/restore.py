"""Prefixes that come back from stores: read before a sequence starts, filled once it runs."""

from __future__ import annotations

from collections.abc import Callable

from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.fetches import ChainFetch
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.tiers import ArrivedBlock, Tiers
from mlx_parallm.generation.scheduler.running import RunningSet
from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.step_plan import StepPlan

#: Gives a running sequence blocks for its next tokens; False if it was preempted for lack of them.
MakeRoom = Callable[[Sequence, int, StepPlan], bool]


class Restorer:
    """Gives sequences the blocks that stores have of their prompts.

    No block is allocated, and no token counts as computed, before the bytes are in host memory and
    verified. What could not be read is computed.
    """

    def __init__(self, kv: KVCacheManager, tiers: Tiers, running: RunningSet) -> None:
        self._kv = kv
        self._tiers = tiers
        self._running = running

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
        runs = self._kv.find_stored(table, known)
        if not runs:
            return False
        num_blocks = sum(len(run.contents) for run in runs)
        sequence.fetch = self._tiers.fetches.add(runs, num_blocks * self._kv.block_size)
        if sequence.fetch is None:
            return False
        sequence.arrivals.append(sequence.fetch)
        return sequence.is_blocked

    def take(self, sequence: Sequence, known: list[int]) -> None:
        """Have blocks of a sequence that has started filled with what was read for it.

        Others may have computed some of them meanwhile, or have evicted what they follow. Then, as
        after a change of the weights, what was read is of no use.
        """
        if sequence.fetch is None:
            return
        sequence.arrived.extend(self._useful(sequence.fetch, sequence.blocks, known))
        # Only prompts count: looking up a sequence that was preempted is no query either.
        for block in sequence.arrived if not sequence.output_ids else ():
            self._tiers.count_hit(block.tier)
        if not sequence.arrived:
            self._running.end_fetch(sequence)

    def _useful(self, fetch: ChainFetch, table: BlockTable, known: list[int]) -> list[ArrivedBlock]:
        """Return what was read of the blocks that follow a table's, as far as it may be used."""
        contents, arrived = fetch.contents, self._tiers.take(fetch)
        num_had = len(table.blocks)
        most = (len(known) - 1) // self._kv.block_size - num_had
        if most <= 0 or table.lasting_root is None:
            return []
        content = self._kv.next_content(table, known)
        if content not in contents:
            return []
        following = arrived[contents.index(content) :][:most]
        num_whole = self._kv.count_whole(table.inputs, num_had + len(following))
        return following[: num_whole - num_had]

    def fill(self, plan: StepPlan, make_room: MakeRoom) -> None:
        """Plan to fill blocks of running sequences; their tokens count as computed then.

        Beside streams it is one piece, which takes a part of a step's time.
        """
        if not self._tiers.fetches:
            return
        filling = [sequence for sequence in self._running if sequence.arrived]
        if not filling:
            return
        has_streams = any(row.num_remaining == 1 and not row.arrived for row in self._running)
        limit = self._tiers.piece if has_streams else self._tiers.alone_piece
        for sequence in filling:
            while sequence.arrived and len(plan.filled) < limit:
                if not make_room(sequence, self._kv.block_size, plan):
                    break
                self._fill_next(sequence, plan)
            if sequence.slot is not None and not sequence.arrived:
                sequence.num_drafted = self._kv.count_drafted(sequence.blocks)
                self._running.end_fetch(sequence)

    def _fill_next(self, sequence: Sequence, plan: StepPlan) -> None:
        arrived = sequence.arrived.popleft()
        sequence.num_computed += self._kv.block_size
        block = self._kv.filled_block(
            sequence.blocks, sequence.num_computed, is_drafted=arrived.is_drafted
        )
        plan.filled[block] = arrived.data
        plan.filling.add(sequence)
