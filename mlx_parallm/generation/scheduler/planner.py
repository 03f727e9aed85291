"""Decides what the next step runs, and gives it slots and blocks."""

from __future__ import annotations

import math

from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.beams.live import LiveBeams
from mlx_parallm.generation.scheduler.restore import Restorer
from mlx_parallm.generation.scheduler.running import ClientShares, RunningSet
from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.snapshotting import Snapshotter
from mlx_parallm.generation.scheduler.speculating import Speculator
from mlx_parallm.generation.scheduler.starting import Starter
from mlx_parallm.generation.scheduler.step_cost import MIN_CHUNK
from mlx_parallm.generation.scheduler.step_plan import StepPlan
from mlx_parallm.generation.scheduler.step_times import STAGES_SHARE, StepTimes
from mlx_parallm.generation.scheduler.waiting import WaitingQueue

# CHUNK_SHARE: a prompt gets at most this share of the token budget before all others had theirs, so
# that a long prompt does not delay short ones. The rest of the budget goes to unfinished prompts.
CHUNK_SHARE = 4


class Planner:
    """Moves sequences between waiting and running; counts what happened.

    Attributes:
        beams: the requests with beams.
        starter: starts waiting sequences.
        num_preemptions: how often a sequence was sent back to wait.
        token_budget: most tokens of a step.
    """

    def __init__(
        self,
        times: StepTimes,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        running: RunningSet,
        speculator: Speculator | None,
        snapshotter: Snapshotter,
        *,
        max_model_len: int,
    ) -> None:
        self.token_budget = times.token_budget
        self._times = times
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._speculator = speculator
        self._snapshotter = snapshotter
        self.beams = LiveBeams(kv, running, has_state=snapshotter.has_state)
        self._shares = ClientShares(waiting, running)
        self._restorer = None
        if kv.tiers is not None:
            self._restorer = Restorer(kv, kv.tiers, running, snapshotter)
        self._max_model_len = max_model_len
        self.starter = Starter(kv, waiting, running, self._restorer, self.beams)
        self.num_preemptions = 0

    def plan(self, *, is_shared: bool = False) -> StepPlan:
        """Return the next step: decode rows, then chunks of running prompts, then admissions.

        ``is_shared`` is True if streams of other models wait for the step.
        """
        plan = StepPlan(self.token_budget, is_shared=is_shared)
        self._running.input_runs.settle()
        if self._kv.tiers is not None:
            self._kv.tiers.fetches.note_plan()
        if self._running.adapters.blocked:
            # A sequence whose client is at its limit waits for the client, not for an adapter.
            heads = filter(self._running.allows_client, self._waiting.heads())
            adapters = {sequence.group.adapter for sequence in heads}
            self._running.adapters.keep_waiting({name for name in adapters if name is not None})
        self._preempt_for_shares()
        self._fill(plan)
        if self._plan_decode(plan):
            return plan
        for leader in [sequence for sequence in plan.num_tokens if sequence.followers]:
            self._fork_followers(leader, plan)
        plan.has_streams = bool(plan.num_tokens) or any(row.num_pending for row in self._running)
        self._compute_inputs(plan, is_first=True)
        has_others = len(plan.num_tokens) < len(self._running)
        prefilling = [each for each in self._running if has_others and each.is_prefilling]
        if self._times.bound_s and plan.num_tokens and (prefilling or len(self._waiting)):
            plan.allowance = self._times.prefill(plan)
        num_running = len(self._running)
        chunk = self._chunk(plan, prefilling)
        self._plan_prefill(plan, chunk, prefilling)
        self._admit(plan, chunk)
        self._compute_inputs(plan, is_first=False)
        if prefilling or len(self._running) > num_running or plan.has_new_products:
            self._spread_rest(plan)
        self._snapshotter.trim(plan)
        if self._speculator is not None:
            self._speculator.plan_drafts(plan, len(self._running))
        return plan

    def _fill(self, plan: StepPlan) -> None:
        if self._restorer is not None:
            self._restorer.fill(plan, self._make_room)

    def _preempt_for_shares(self) -> None:
        """Preempt sequences beyond their client's share while other clients wait for theirs."""
        self._shares.look()
        owed = self._shares.owed
        if not owed:
            return
        needed = sum(self._kv.blocks_for(len(sequence.token_ids)) for sequence in owed)
        for victim in self._shares.overdrawn():
            if self._running.num_free_slots >= len(owed) and self._running.count_spare() >= needed:
                return
            if victim.slot is not None:
                self._waiting.put_back(self._send_back(victim, leaves_state=True))

    def _plan_decode(self, plan: StepPlan) -> bool:
        """Add decode rows and their proposals.

        Returns:
            Whether nothing at all should run before the step in flight has ended.
        """
        decoding = self._decoding()
        num_verifying = 0
        if self._speculator is not None:
            num_verifying = sum(sequence.num_proposed > 0 for sequence in self._running)
            if self._speculator.await_tokens(decoding, num_verifying, plan):
                return True
        if self._fork_beams(plan):
            decoding = self._decoding()
        # Each row is sure of one token; tokens that run again share what that leaves.
        spare, block_size = plan.budget_left - len(decoding), self._kv.block_size
        for sequence in decoding:
            if sequence in plan.awaited:
                continue
            # Most rows wait for nothing and have a block for their token.
            table, is_plain = sequence.table, sequence.is_plain
            if is_plain and table and sequence.num_computed < len(table.blocks) * block_size:
                plan.add(sequence, 1)
                continue
            count = 1 + min(sequence.num_replayed, max(spare, 0)) if sequence.replay_end else 1
            if not self._runnable(sequence, count, plan):
                continue
            if self._make_room(sequence, count, plan):
                plan.add(sequence, count)
                spare -= count - 1
        if self._speculator is not None:
            self._speculator.propose(
                plan, len(plan.awaited) + num_verifying, self._running.count_spare
            )
        return False

    def _decoding(self) -> list[Sequence]:
        longest = self._max_model_len
        return [each for each in self._running if each.is_decoding and each.may_run(longest)]

    def _fork_beams(self, plan: StepPlan) -> bool:
        """Give beams the blocks that they continue; return True if any were to be given some."""
        due = self.beams.due()
        for beams in due:
            # Another request's beams may have preempted these.
            if beams.is_due:
                num_blocks = self.beams.release(beams)
                if self._free_blocks(num_blocks, beams.leader, plan):
                    self.beams.fork(beams, plan)
        return bool(due)

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Give a running sequence blocks for its next tokens, preempting worse ones if it must.

        Return False if the sequence no longer runs: a better one preempted it, or it is the worst
        and must wait itself. The best one always gets there, since it fits the pool alone.
        """
        if sequence.slot is None:
            return False
        while not self._kv.grow(sequence.blocks, sequence.num_computed + num_tokens):
            if sequence in self._preempt_worst(plan):
                return False
        return True

    def _free_blocks(self, count: int, sequence: Sequence, plan: StepPlan) -> bool:
        """Have blocks free for a running sequence; see ``_make_room``."""
        while self._kv.num_free < count:
            if sequence in self._preempt_worst(plan):
                return False
        return True

    def _preempt_worst(self, plan: StepPlan) -> list[Sequence]:
        """Preempt the worst running sequence and its mates, and return them."""
        victim = self._running.worst
        victims = self.beams.mates(victim)
        for sequence in victims:
            plan.drop(sequence)
        self._preempt(victim, leaves_state=True)
        return victims

    def _preempt(self, sequence: Sequence, *, leaves_state: bool = False) -> None:
        """Let a running sequence wait, with the other beams of its request."""
        self._waiting.push_front(self._send_back(sequence, leaves_state=leaves_state))

    def _send_back(self, sequence: Sequence, *, leaves_state: bool) -> Sequence:
        """Stop a running sequence and its mates; return the one that is to wait."""
        beams = self.beams.of(sequence)
        if beams is not None:
            self.num_preemptions += len(beams.running)
            return self.beams.stop(beams)
        tail = self._snapshotter.leave(sequence) if leaves_state else None
        self._running.stop(sequence)
        sequence.tail = tail
        self.num_preemptions += 1
        return sequence

    def preempt_all(self) -> None:
        """Preempt every running sequence, whose state may be wrong."""
        for sequence in reversed(list(self._running)):
            if sequence.slot is not None:
                self._preempt(sequence)

    def refresh_weights(self) -> None:
        """Let running sequences continue with their changed weights.

        The blocks of such a sequence hold KV of both versions, so the prefix cache gets none of its
        later blocks. A sequence that has sampled no token with these blocks is preempted: thus the
        versions of a sample's tokens are all versions that computed it.
        """
        changed = [
            sequence
            for sequence in self._running
            if sequence.content != sequence.group.weights.content
        ]
        for sequence in changed:
            self._running.leave_adapter(sequence)
        staying = {
            sequence
            for sequence in changed
            # Blocks of tokens that run again have KV that may be cached.
            if sequence.is_caught_up
            and not sequence.num_replayed
            and self._running.take_adapter(sequence)
        }
        for sequence in reversed(changed):
            if sequence.slot is None:
                # It was preempted with another beam.
                continue
            if staying.issuperset(self.beams.mates(sequence)):
                self._kv.withhold(sequence.blocks)
                sequence.content = sequence.group.weights.content
            else:
                self._preempt(sequence)

    def _compute_inputs(self, plan: StepPlan, *, is_first: bool) -> None:
        """Plan stages of the inputs that running sequences wait for.

        It is called before any prefill is planned, then again for sequences whose prefill was
        planned up to an input.
        """
        runs = self._running.input_runs
        cost = runs.next_cost
        if not cost or (not is_first and plan.num_tokens and cost > plan.budget_left):
            return
        if plan.stages is None:
            begins, has_prompts = runs.begins_next, self._has_prompts()
            plan.stages = self._times.stages(plan, cost, begins=begins, has_prompts=has_prompts)
        before = plan.stages.taken
        plan.has_new_products |= runs.advance(plan.stages)
        taken = plan.stages.taken - before
        # Stages that are bounded by a time leave tokens for the prompts that wait for them.
        most = math.inf if plan.stages.is_whole else STAGES_SHARE * self.token_budget
        plan.spend(min(taken, most))

    def _has_prompts(self) -> bool:
        """Return True if there are prompts that could be prefilled now."""
        return len(self._waiting) > 0 or any(
            sequence.is_prefilling and not sequence.is_blocked for sequence in self._running
        )

    def _chunk(self, plan: StepPlan, prefilling: list[Sequence]) -> int:
        """Return a prompt's first chunk: a share of the budget, or of what fits the time bound.

        Within a bound it may be as large as without one, up to half of what fits, so that most
        prompts are computed in one step.
        """
        chunk = max(1, self.token_budget // CHUNK_SHARE)
        if plan.allowance is None:
            return chunk
        longest = max((sequence.num_computed for sequence in prefilling), default=0)
        room = min(plan.allowance.room(longest), self.token_budget)
        return max(MIN_CHUNK, room // CHUNK_SHARE, min(chunk, room // 2))

    def _plan_prefill(self, plan: StepPlan, chunk: int, prefilling: list[Sequence]) -> None:
        """Add the best prompt, then prompts that one chunk completes, then the other long ones.

        All but the best leave a chunk of the budget to those that wait.
        """
        best, others = prefilling[:1], prefilling[1:]
        others.sort(key=lambda sequence: sequence.num_schedulable > chunk)
        for sequence in best:
            self._add_chunk(sequence, chunk, plan)
        reserve = chunk if len(self._waiting) and self._running.num_free_slots else 0
        for sequence in others:
            self._add_chunk(sequence, chunk, plan, reserve)

    def _add_chunk(self, sequence: Sequence, chunk: int, plan: StepPlan, reserve: int = 0) -> None:
        room = plan.room(sequence.num_computed) - reserve
        num_tokens = self._runnable(sequence, min(sequence.num_schedulable, chunk, room), plan)
        if num_tokens > 0 and self._make_room(sequence, num_tokens, plan):
            plan.add(sequence, num_tokens)

    def _runnable(self, sequence: Sequence, limit: int, plan: StepPlan) -> int:
        """Return how many of a sequence's next tokens can run in this step.

        They are at most ``limit``, unless they begin with rows that must not be cut; they end
        where the state is kept, and before an input that is not computed. Fewer than a block of
        tokens wait for it beside decode rows: a step of these alone is shorter, and the prefix
        cache keeps whole blocks only. None run before blocks that stores had are filled.
        """
        inputs, held = sequence.group.inputs, sequence.held
        if sequence.arrived:
            return 0
        if sequence.slot is None:  # a better sequence preempted it
            return 0
        if limit <= 0 or (held is None and not self._snapshotter.cuts):
            return limit
        planned = plan.num_tokens.get(sequence, 0)
        start = sequence.num_computed + planned
        if not sequence.is_decoding:
            limit = self._snapshotter.stop(sequence, start, limit, is_planned=planned > 0)
        if held is None or limit <= 0:
            return limit
        stop = inputs.cut(start, start + limit)
        if stop == start:
            stop = inputs.end_of(start)
            # Rows that fit a step wait for other prompts, but never for decode rows.
            if stop - start > plan.budget_left and not plan.is_decode:
                return 0
        ready = inputs.cut(start, held.acquire(start, stop))
        is_worth = ready == stop or ready - start >= self._kv.block_size
        return ready - start if is_worth or not plan.has_streams else 0

    def _admit(self, plan: StepPlan, chunk: int) -> None:
        """Start waiting sequences while there are slots, blocks for their prompts, and budget."""
        while self._running.num_free_slots and plan.room() > 0 and not plan.has_preempted:
            sequence = self._waiting.peek(self._may_start, self._shares.is_owed)
            if sequence is None:
                return
            if not self.starter.try_start(sequence):
                if sequence.is_blocked:
                    # Its blocks are being read; others may go.
                    continue
                return
            self._fill(plan)
            for beam in self._begin_beams(sequence, plan):
                self._add_chunk(beam, chunk, plan)
            if sequence.num_remaining == 1 and not sequence.arrived:
                # All but the last prompt token was cached.
                self._fork_followers(sequence, plan)

    def _begin_beams(self, sequence: Sequence, plan: StepPlan) -> list[Sequence]:
        """Return what can run of a sequence that has started: itself, and beams forked of it."""
        beams = self.beams.of(sequence)
        if beams is None or not beams.is_due:
            return [sequence]
        self.beams.fork(beams, plan)
        return beams.live

    def _may_start(self, sequence: Sequence) -> bool:
        """Return True if a slot and its adapter are free and no step in flight samples for it."""
        # Sequences whose blocks are being read keep slots free.
        reserved = 0
        is_reading = sequence.fetch is not None or sequence.source_read is not None
        if self._restorer is not None and not is_reading:
            # One is left: else nothing would run while what comes first here needs none of these.
            reserved = min(self._restorer.num_reserved, self._running.num_slots - 1)
        has_slot = self._running.num_free_slots > reserved
        return has_slot and not sequence.num_pending and self._running.may_start(sequence)

    def _fork_followers(self, leader: Sequence, plan: StepPlan) -> None:
        """Fork samples from the leader that has computed all but the last prompt token."""
        followers, leader.followers = leader.followers, []
        for position, follower in enumerate(followers):
            if not self._fork(leader, follower, plan):
                # The remaining samples start from the prefix cache when there is room.
                for late in reversed(followers[position:]):
                    self._waiting.push_front(late)
                return

    def _fork(self, leader: Sequence, follower: Sequence, plan: StepPlan) -> bool:
        if not self._running.num_free_slots or plan.budget_left < 1 or plan.has_preempted:
            return False
        # The leader already holds their adapter's slot.
        if not self._running.allows_client(follower):
            return False
        if self._shares.owed and not self._shares.is_owed(follower):
            return False
        forked = self._kv.fork(leader.blocks, leader.num_computed)
        if forked is None:
            return False
        table, block_copy = forked
        room = self._running.count_spare()
        if not self._kv.grow(table, leader.num_computed + 1) or not self._running.hold_source(
            follower, room
        ):
            self._kv.free(table)
            return False
        self._running.start(follower, table, leader.num_computed)
        if not self._runnable(follower, 1, plan):
            self._running.stop(follower)
            return False
        follower.num_drafted = min(leader.num_drafted, leader.num_computed)
        if block_copy is not None:
            plan.block_copies[follower] = block_copy
        if self._snapshotter.has_state and leader.slot is not None and follower.slot is not None:
            plan.state_copies[follower] = (leader.slot, follower.slot)
        plan.add(follower, 1)
        return True

    def _spread_rest(self, plan: StepPlan) -> None:
        """Spend the remaining budget on running prompts, best first, without preemption."""
        if plan.budget_left == 0:
            return
        for sequence in list(self._running):
            if sequence in plan.awaited or not sequence.may_run(self._max_model_len):
                continue
            planned = plan.num_tokens.get(sequence, 0)
            room = plan.room(sequence.num_computed + planned)
            more = self._runnable(sequence, min(sequence.num_schedulable - planned, room), plan)
            if more > 0 and self._kv.grow(sequence.blocks, sequence.num_computed + planned + more):
                plan.add(sequence, more)
                if sequence.followers and sequence.num_remaining == 1:
                    # All else of its prompt was cached, or filled while its source was computed.
                    self._fork_followers(sequence, plan)
