"""Starts waiting sequences: cached prefix, source, and room for the whole prompt, or nothing."""

from __future__ import annotations

from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.beams.live import LiveBeams
from mlx_parallm.generation.scheduler.restore import Restorer
from mlx_parallm.generation.scheduler.running import RunningSet
from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.waiting import WaitingQueue


class Starter:
    """Moves sequences from waiting to running.

    Attributes:
        prefix_queries: prompt tokens looked up in the prefix cache so far.
        prefix_hits: how many of them were found.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        running: RunningSet,
        restorer: Restorer | None,
        beams: LiveBeams,
    ) -> None:
        """``restorer``: reads prefixes from stores; None if there are none."""
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._restorer = restorer
        self._beams = beams

    def try_start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and its cached prefix, if its whole prompt has room.

        It has room for its source too, or does not start. Blocks that running prompts still need
        are not available to it.
        """
        available = self._running.count_spare()
        if available <= sequence.blocked_at:
            return False
        if self._running.num_free_slots < self._running.num_needed(sequence):
            return False
        sequence.group.refresh_weights()
        known = self._known(sequence)
        is_cached = sequence.group.weights.is_cached
        use_cache = sequence.group.num_reusable > 0 and is_cached
        table = self._new_table(sequence, known, use_cache=use_cache)
        if not is_cached:
            self._kv.withhold(table)
        if self._awaits(sequence, table, known, use_cache=use_cache):
            self._kv.free(table, is_saved=False)
            return False
        if not self._has_room(sequence, table):
            self._kv.free(table, is_saved=False)
            self._running.leave_inputs(sequence)
            sequence.blocked_at = available
            return False
        self._kv.claim_tail(table)
        self._waiting.admit(sequence)
        self._running.start(sequence, table, table.num_cached)
        if self._restorer is not None:
            self._restorer.take(sequence, known)
        self._count_prefix(sequence, use_cache=use_cache)
        return True

    def _known(self, sequence: Sequence) -> list[int]:
        """Return those tokens of a sequence that may be cached, and one more."""
        reusable, known = sequence.group.num_reusable, sequence.token_ids
        if reusable <= 0:
            return known
        if sequence.fork_at:
            # A state that is found is the sequence's only once a row of it has run.
            reusable = min(reusable, sequence.fork_at - self._beams.has_state)
        return known[: reusable + 1] if reusable < len(known) else known

    def _awaits(
        self, sequence: Sequence, table: BlockTable, known: list[int], *, use_cache: bool
    ) -> bool:
        """Begin to read what stores have for a sequence; True if it has to be awaited."""
        restorer = self._restorer
        if restorer is None:
            return False
        awaits_prefix = use_cache and restorer.reads(sequence, table, known)
        return self._running.await_source(sequence) or awaits_prefix

    def _has_room(self, sequence: Sequence, table: BlockTable) -> bool:
        """Return True if a sequence, with its source if it has one, can start with a table."""
        missing = self._kv.blocks_for(len(sequence.token_ids)) - len(table.blocks)
        missing += self._beams.count_fork_blocks(sequence)
        if not self._running.hold_source(sequence, self._running.count_spare() - missing):
            return False
        return missing <= self._running.count_spare()

    def _new_table(self, sequence: Sequence, known: list[int], *, use_cache: bool) -> BlockTable:
        """Return a table with the cached blocks of a sequence's tokens."""
        tiers, group = self._kv.tiers, sequence.group
        return self._kv.new_table(
            known,
            group.salt,
            use_cache=use_cache,
            inputs=group.inputs,
            lasting_salt=None if tiers is None else tiers.salt(group.lasting_salt),
            tail=sequence.tail,
        )

    def _count_prefix(self, sequence: Sequence, *, use_cache: bool) -> None:
        has_cache = self._kv.enable_prefix_caching and not sequence.output_ids
        if use_cache and has_cache:
            self.prefix_queries += len(sequence.token_ids)
            self.prefix_hits += sequence.blocks.num_cached
        if has_cache and sequence.group.weights.is_cached:
            self._count_source(sequence)
        if sequence.group.num_cached_tokens is None:
            num_filled = sum(not each.is_state for each in sequence.arrived)
            num_stored = num_filled * self._kv.block_size
            num_found = 0 if sequence.held is None else sequence.held.num_cached
            sequence.group.num_cached_tokens = sequence.num_computed + num_stored + num_found

    def _count_source(self, sequence: Sequence) -> None:
        source, held = sequence.group.source, sequence.held
        if source is None or held is None:
            return
        self.prefix_queries += source.num_kv_tokens
        self.prefix_hits += held.num_cached - sum(held.hits.values())
        for tier, num_tokens in held.hits.items():
            assert self._kv.tiers is not None, "only stores are hit"
            self._kv.tiers.count_hit(tier, num_tokens)
