"""Where prompts are cut so that their states can be kept, and the copies that keep them.

A snapshot is made of the state with which a step leaves a sequence. The copy is part of the next
step, before its forward, because a step may be scheduled before the one before it has ended.
Nothing finds the snapshot until both have succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain

from mlx_parallm.generation.kv_cache.blocks import BlockTable, Tail
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.snapshots import NO_SNAPSHOTS, SnapshotStats, StateSnapshots
from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.generation.scheduler.step_plan import StepPlan
from mlx_parallm.types.work import LEAST_SHARED


@dataclass(slots=True, eq=False)
class Capture:
    """A snapshot that is being made.

    Attributes:
        sequence: whose state it is.
        table: the blocks of the prefix.
        num_tokens: the length of the prefix.
        source: the slot of the sequence.
        target: the slot of the snapshot.
        made_by: the step that leaves the state.
        is_passing: see ``StateSnapshots.commit``.
        follows: the content of the snapshot that the sequence began with; empty for none.
        prefix: the content that the prefix will have; empty if its tokens are not known yet.
        content: of the prefix; None until the step has ended.
        links: the hashes of the blocks that a preempted sequence had computed.
        is_void: True if the snapshot must not be found.
    """

    sequence: Sequence
    table: BlockTable
    num_tokens: int
    source: int
    target: int
    made_by: int
    is_passing: bool = False
    follows: bytes = b""
    prefix: bytes = b""
    content: bytes | None = None
    links: list[bytes] = field(default_factory=list[bytes])
    is_void: bool = False


class Snapshotter:
    """Decides which states are kept.

    These are: after the last whole block of a prompt that the next turn of a chat begins with;
    after the last whole block before the latest user turn, with which the next turn begins if the
    template drops the reasoning of the answer, or if that turn is not known, where the prompt parts
    from an earlier one; and every ``interval`` tokens.

    Attributes:
        has_state: True if sequences have a state besides KV.
        cuts: True if prompts are cut where their states are kept.
    """

    def __init__(self, kv: KVCacheManager, interval: int, *, has_state: bool) -> None:
        """Begin without snapshots.

        Args:
            kv: has their slots; none if they are not kept.
            interval: tokens between snapshots within a prompt.
            has_state: True if sequences have a state at all.
        """
        self.has_state = has_state
        self.cuts = kv.snapshots is not None
        self._kv = kv
        self._interval = interval
        self._latest_step = -1
        # Those that the next step copies, and those that steps in flight copy.
        self._due: list[Capture] = []
        self._begun: dict[int, list[Capture]] = {}

    @property
    def _snapshots(self) -> StateSnapshots | None:
        return self._kv.snapshots

    def stop(self, sequence: Sequence, start: int, limit: int, *, is_planned: bool) -> int:
        """Return how many of at most ``limit`` rows from ``start`` may run before the next place.

        ``is_planned``: rows before ``start`` are in the same step. None may follow them there if
        they end at a place.
        """
        if limit <= 1 and not is_planned:
            return limit
        if self._snapshots is None or not self._kv.is_current(sequence.blocks):
            return limit
        places = self._places(sequence)
        if start - sequence.num_computed + limit >= 2 * self._interval:
            # Otherwise a step of a large budget would leave no state in so long a part.
            num_blocks = self._kv.blocks_for(sequence.num_kept + self._interval)
            places += (num_blocks * self._kv.block_size,)
        if is_planned and start in places:
            return 0
        ahead = [place - start for place in places if start < place < start + limit]
        return min(ahead, default=limit)

    def _places(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the positions of a prompt after which its state is asked for."""
        size = self._kv.block_size
        request, end = sequence.request, len(sequence.token_ids) - 1
        last = end
        if request.answer_start is not None and not sequence.output_ids:
            last = min(end, request.answer_start)
        turn = request.turn_start
        if turn is None:
            # Where this prompt parts from an earlier one, further ones probably will too.
            table = sequence.blocks
            is_much = table.num_matched - table.num_cached >= LEAST_SHARED
            turn = table.num_matched if is_much else 0
        places = [turn, last]
        if end - last >= LEAST_SHARED:
            # Templates may move much into the next turn, but the same prompt may come again.
            places.insert(0, end)
        return tuple(place // size * size for place in places)

    def trim(self, plan: StepPlan) -> None:
        """End chunks with a whole block where the state after them is kept."""
        if self._snapshots is None:
            return
        for sequence, num_tokens in plan.num_tokens.items():
            start = sequence.num_computed
            rest = (start + num_tokens) % self._kv.block_size
            end = start + num_tokens - rest
            is_due = num_tokens > rest > 0 and self._is_due(sequence, end)
            if is_due and not sequence.is_decoding and sequence.group.inputs.cut(start, end) == end:
                plan.num_tokens[sequence] -= rest
                plan.budget_left += rest

    def _is_due(self, sequence: Sequence, end: int) -> bool:
        """Return True if a state is kept after ``end`` tokens as the last one is far behind."""
        return end - sequence.num_kept >= self._interval and self._kv.is_current(sequence.blocks)

    def note(self, plan: StepPlan, step_id: int) -> None:
        """Keep states that a planned step leaves, before its tokens count as computed."""
        self._latest_step = step_id
        if self._snapshots is None:
            return
        for sequence, num_tokens in plan.num_tokens.items():
            end = sequence.num_computed + num_tokens
            if end % self._kv.block_size or sequence in plan.proposals:
                continue
            places = self._places(sequence)
            is_kept = self._kv.is_current(sequence.blocks) and (
                end in places or self._is_due(sequence, end)
            )
            if is_kept and sequence.group.inputs.cut(0, end) == end:
                self._keep_once(sequence, end, is_passing=end != places[-1])

    def _keep_once(self, sequence: Sequence, num_tokens: int, *, is_passing: bool) -> None:
        """Keep a state unless that after an equal prefix is kept, which counts as used then.

        Otherwise equal prompts that run side by side would each evict a snapshot.
        """
        assert self._snapshots is not None
        table, prefix = sequence.blocks, b""
        if num_tokens <= len(sequence.token_ids):
            prefix = self._kv.content_after(table, sequence.token_ids, num_tokens)
        if self._snapshots.has(prefix):
            self._snapshots.release(self._snapshots.hold(prefix))
        elif not prefix or all(each.prefix != prefix for each in self._all()):
            capture = self._capture(sequence, num_tokens, is_passing=is_passing)
            if capture is None:
                return
            capture.prefix = prefix
        sequence.num_kept = num_tokens

    def _capture(
        self, sequence: Sequence, num_tokens: int, *, is_passing: bool = False
    ) -> Capture | None:
        assert self._snapshots is not None
        assert sequence.slot is not None
        target = self._kv.reserve_snapshot(is_passing=is_passing)
        if target is None:
            return None
        table, slot = sequence.blocks, sequence.slot
        if sequence.restored_from is not None:
            # Its own slot has the state after proposals that were refused.
            slot = sequence.restored_from
        capture = Capture(
            sequence,
            table,
            num_tokens,
            slot,
            target,
            self._latest_step,
            is_passing=is_passing,
            follows=b"" if is_passing else table.found,
        )
        self._due.append(capture)
        return capture

    def keep_filled(self, sequence: Sequence, content: bytes) -> None:
        """Keep the state that a sequence's slot is filled with before the next step.

        What is still to be copied from the slot is given up: slots are filled before copies.
        """
        assert self._snapshots is not None, "a state is filled"
        self._void(lambda each: each in self._due and each.source == sequence.slot)
        sequence.num_kept = sequence.num_computed
        if self._kv.is_current(sequence.blocks) and not self._snapshots.has(content):
            capture = self._capture(sequence, sequence.num_computed)
            if capture is not None:
                capture.content = content

    def leave(self, sequence: Sequence) -> Tail | None:
        """Keep the state with which a sequence is preempted.

        Return how that is found again; None if it is found as other prefixes are, or not at all.
        """
        table, num_tokens = sequence.blocks, sequence.num_computed
        is_exact = sequence.is_caught_up and not sequence.num_proposed
        if self._snapshots is None or table.snapshot is not None or not is_exact:
            return None
        tail = self._kv.leave_tail(table, sequence.token_ids, num_tokens)
        if tail is None or self._snapshots.has(tail.content):
            return None
        capture = self._capture(sequence, num_tokens)
        if capture is None:
            return None
        capture.content = tail.content
        capture.links = table.hashes[table.num_cached // self._kv.block_size :]
        return None if tail.is_whole else tail

    def take_copies(self, plan: StepPlan, step_id: int) -> list[tuple[int, int]]:
        """Return the copies that make snapshots, before the rows of a planned step."""
        if not (self._due and plan.num_tokens):
            return []
        due = self._begun[step_id] = self._due
        self._due = []
        return [(capture.source, capture.target) for capture in due]

    def take_restores(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Return the copies that give sequences, before their first rows, the states found."""
        if not self.cuts:
            return []
        return [
            (self._kv.take_snapshot(sequence.blocks), sequence.slot)
            for sequence in plan.num_tokens
            if sequence.blocks.snapshot is not None and sequence.slot is not None
        ]

    def resolve(self, sequence: Sequence, num_tokens: int) -> None:
        """Note the content of a prefix that a step has computed, once its blocks have theirs."""
        for capture in self._all():
            if capture.sequence is sequence and capture.num_tokens == num_tokens:
                num_blocks, hashes = num_tokens // self._kv.block_size, capture.table.hashes
                if capture.content is None and len(hashes) >= num_blocks:
                    capture.content = capture.table.root + hashes[num_blocks - 1]

    def end(self, step_id: int, bad_slots: Collection[int]) -> set[RequestGroup]:
        """Let the snapshots that a step has copied be found.

        Return the requests of those in ``bad_slots``, of which nothing is kept.
        """
        begun = self._begun.pop(step_id, [])
        bad = [capture for capture in begun if capture.target in bad_slots]
        for capture in begun:
            capture.is_void |= capture in bad
            self._settle(capture)
        for capture in bad:
            # KV of layers behind the state has NaN too, and its blocks may be findable by now.
            self._kv.forget_computed(capture.table, capture.links)
        return {capture.sequence.group for capture in bad}

    def _settle(self, capture: Capture) -> None:
        assert self._snapshots is not None
        if capture.is_void or capture.content is None:
            self._snapshots.cancel(capture.target)
        else:
            self._kv.commit_snapshot(
                capture.target, capture.table, capture.content, is_passing=capture.is_passing
            )
            self._snapshots.follow(capture.follows)

    def fail(self, step_id: int) -> None:
        """Keep nothing that a failed step computed or copied."""
        self._void(lambda each: each.made_by == step_id)
        for capture in self._begun.pop(step_id, ()):
            capture.is_void = True
            self._settle(capture)

    def fail_group(self, group: RequestGroup) -> None:
        """Keep nothing more of a request that failed."""
        self._void(lambda each: each.sequence.group is group)

    def clear(self) -> None:
        """Let none of the snapshots that are being made be found; their states may be gone."""
        self._void(lambda _: True)

    def _void(self, is_bad: Callable[[Capture], bool]) -> None:
        """Let some of the snapshots that are being made not be found; no further step copies them.

        Their sources may have no state, or arrays of a failed step, which would fail that one too.
        """
        for capture in filter(is_bad, self._all()):
            capture.is_void = True
            if capture in self._due:
                self._due.remove(capture)
                self._settle(capture)

    def _all(self) -> list[Capture]:
        if not (self._due or self._begun):
            return []
        return [*self._due, *chain.from_iterable(self._begun.values())]

    @property
    def stats(self) -> SnapshotStats:
        """Return how many snapshots there are."""
        return NO_SNAPSHOTS if self._snapshots is None else self._snapshots.stats

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Assert that every slot is accounted for, given the tables of running sequences."""
        if self._snapshots is not None:
            held = [table.snapshot for table in tables if table.snapshot is not None]
            self._snapshots.check_integrity(held, [capture.target for capture in self._all()])
