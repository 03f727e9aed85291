"""Chooses what runs in the next step, and applies what a step produced."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count

from mlx_parallm.config import STATE_SNAPSHOT_TOKENS, SchedulerConfig, SpeculativeConfig
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.generation.admission import StepRoom, fitted
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.batch_rows import planned_rows, schedule_row
from mlx_parallm.generation.scheduler.endings import Endings
from mlx_parallm.generation.scheduler.planner import Planner
from mlx_parallm.generation.scheduler.row_results import RowResults, by_sequence
from mlx_parallm.generation.scheduler.running import LiveRequests, RunningSet
from mlx_parallm.generation.scheduler.sequence import RowInFlight
from mlx_parallm.generation.scheduler.snapshotting import Snapshotter
from mlx_parallm.generation.scheduler.speculating import KeptSlots, Speculator, take_copies
from mlx_parallm.generation.scheduler.step_plan import StepPlan
from mlx_parallm.generation.scheduler.step_times import StepTimes
from mlx_parallm.generation.scheduler.updates import (
    SchedulerStats,
    SequenceUpdate,
    SpeculationStats,
)
from mlx_parallm.generation.scheduler.waiting import WaitingQueue
from mlx_parallm.types.request import GenerateRequest, PolicyWeights
from mlx_parallm.types.step import (
    NO_MOVES,
    Moves,
    ScheduledBatch,
    StepOutput,
)

# BAD_STATE: why a request fails whose state has a NaN.
BAD_STATE = "The model's state has values that are not numbers, so nothing can follow."


class Scheduler:
    """Continuous batching with chunked prefill, forks and preemption by recomputation."""

    def __init__(  # noqa: PLR0913 - facts about the model, by name
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        has_state: bool = False,
        keeps_states: bool = False,
        speculative: SpeculativeConfig | None = None,
        num_tower_stages: int = 1,
        has_sources: bool = False,
        snapshot_tokens: int = STATE_SNAPSHOT_TOKENS,
        pads: bool = False,
        default_stall_ms: float | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            config: limits of steps and of the queue.
            kv: the KV blocks.
            max_model_len: longest sequence.
            has_state: see ``RunnerInfo``.
            keeps_states: see ``RunnerInfo``.
            speculative: speculative decoding; None for none.
            num_tower_stages: see ``RunnerInfo``.
            has_sources: True if the model is an encoder-decoder.
            snapshot_tokens: see ``CacheConfig``.
            pads: True if the runner pads the tokens of a step, see ``padded_tokens``.
            default_stall_ms: the bound of a step with decode rows, where ``config`` has none; None
                for no bound.
        """
        has_snapshots = kv.snapshots is not None
        assert not has_state or has_snapshots or not kv.enable_prefix_caching, "states are not kept"
        self._kv = kv
        # The pool bounds a sequence too: a sequence that has all blocks must be able to end.
        self._max_len = min(max_model_len, kv.num_blocks * kv.block_size)
        self._waiting = WaitingQueue()
        self._running = RunningSet(
            config, kv, num_tower_stages=num_tower_stages, has_sources=has_sources
        )
        self._live = LiveRequests(self._running, config.max_waiting)
        kept = None
        if has_state:
            kept = KeptSlots(config.max_num_seqs + kv.num_snapshot_slots, keeps_states)
        self._speculator = speculative and Speculator(speculative, kv, self._max_len, kept)
        self._snapshotter = Snapshotter(kv, snapshot_tokens, has_state=has_state)
        self._times = StepTimes(
            config,
            kv.tiers,
            has_tower=num_tower_stages > 1,
            pads=pads,
            default_stall_ms=default_stall_ms,
        )
        self._planner = Planner(
            self._times,
            kv,
            self._waiting,
            self._running,
            self._speculator,
            self._snapshotter,
            max_model_len=self._max_len,
        )
        self._room = StepRoom(
            max_len=self._max_len,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            token_budget=self._planner.token_budget,
            num_slots=min(config.max_num_seqs, config.max_num_seqs_per_client or sys.maxsize),
        )
        self._constant = PolicyWeights()
        # Rows by step in flight and seq_id; a sample may end before its step.
        self._in_flight: dict[int, dict[int, RowInFlight]] = {}
        self._steps = count()
        self._started: list[str] = []
        self._endings = Endings(
            self._waiting, self._running, self._live, self._planner.beams, self._snapshotter
        )
        self._results = RowResults(
            kv,
            self._speculator,
            self._snapshotter,
            self._planner.beams,
            self._endings,
            max_len=self._max_len,
        )

    def add(
        self,
        request: GenerateRequest,
        *,
        seed: int,
        end_ids: frozenset[int],
        weights: PolicyWeights | None = None,
    ) -> None:
        """Queue a request; sample i uses ``seed + i``.

        Args:
            request: its id must not be in use.
            seed: of the first sample.
            end_ids: tokens that end a sample, besides ``stop_token_ids``.
            weights: what it is computed with; None for the model that never changes.

        Raises:
            ContextLengthError: it can never fit the context or the pool.
            OverloadedError: too many sequences wait.
            InvalidRequestError: the request's id is in use, or no step can hold an input's rows.
        """
        request = fitted(request, self._room)
        group = self._live.add(request, end_ids, weights or self._constant, seed)
        first, *others = group.sequences.values()
        self._waiting.append(first)
        if group.request.params.beams is not None:
            self._planner.beams.add(group)
        elif group.wants_fork:
            first.followers = others
        else:
            for sequence in others:
                self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Abort a request and free its blocks; return False if the id is unknown."""
        group = self._live.groups.get(request_id)
        if group is None:
            return False
        self._endings.end_request(group)
        return True

    def finish(self, request_id: str, index: int) -> None:
        """End one sample for a reason outside of the scheduler; unknown samples are ignored."""
        group = self._live.groups.get(request_id)
        if group is not None and index in group.sequences:
            self._endings.end(group.sequences[index])

    def observe(self, batch: ScheduledBatch, seconds: float, *, is_end_known: bool = True) -> None:
        """Learn from the time that a step took.

        Args:
            batch: the step.
            seconds: from the end of the step before, or its own begin, until its end was seen.
            is_end_known: False if it may have ended before that.
        """
        self._times.observe(batch, seconds, is_end_known=is_end_known)

    def has_work(self) -> bool:
        """Return True if any request has not ended, or blocks are to be saved."""
        return bool(self._live.groups) or self.has_saves

    @property
    def has_saves(self) -> bool:
        """Return True if blocks are to be saved, and stores take them now."""
        tiers = self._kv.tiers
        return tiers is not None and tiers.can_save

    def has_request(self, request_id: str) -> bool:
        """Return True if this request has not ended."""
        return request_id in self._live.groups

    def take_started(self) -> list[str]:
        """Return the ids of requests scheduled for the first time since the last call."""
        started, self._started = self._started, []
        return started

    @property
    def adapters(self) -> AdapterSlots:
        """Return the slots of adapters."""
        return self._running.adapters

    def refresh_weights(self) -> None:
        """Continue with changed weights; called between two steps."""
        self._planner.refresh_weights()

    def recompute_running(self) -> None:
        """Preempt all running sequences, which are then computed anew; no step may be in flight."""
        self._planner.preempt_all()

    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """Empty the prefix cache: blocks in the pool and snapshots; stores keep what they have.

        ``reset_running``: running sequences are preempted and computed anew.
        """
        if reset_running:
            self.recompute_running()
        self._kv.reset_prefix_cache()
        self._snapshotter.clear()
        self._running.forget_inputs()

    def schedule_saves(self) -> ScheduledBatch | None:
        """Return a batch that only saves blocks for stores; None if none may be saved now."""
        tiers = self._kv.tiers
        moves = NO_MOVES if tiers is None else tiers.add_saves(NO_MOVES, is_alone=True)
        if not moves:
            return None
        step_id = next(self._steps)
        self._in_flight[step_id] = {}
        return ScheduledBatch(step_id=step_id, sequences=(), moves=moves)

    def borrowed_block(self) -> AbstractContextManager[int | None]:
        """Return a context that holds a KV block; see ``KVCacheManager.borrowed_block``."""
        return self._kv.borrowed_block()

    def uses(self, content: str) -> bool:
        """Return True if a request that has not ended uses this adapter."""
        return any(group.adapter == content for group in self._live.groups.values())

    def num_running(self, content: str) -> int:
        """Return how many sequences run with this adapter."""
        return self.adapters.users(content)

    @property
    def token_budget(self) -> int:
        """Return the most tokens of a step."""
        return self._planner.token_budget

    def stats(self) -> SchedulerStats:
        """Return how full the scheduler is, and its counters."""
        inputs, sources = self._running.inputs, self._running.sources
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=self._live.num_waiting,
            num_waiting_tokens=self._waiting.num_tokens,
            kv_usage=self._kv.usage,
            num_free_blocks=self._kv.num_free,
            prefix_queries=self._planner.starter.prefix_queries,
            prefix_hits=self._planner.starter.prefix_hits,
            num_preemptions=self._planner.num_preemptions,
            speculation=self._speculator.stats() if self._speculator else SpeculationStats(),
            images_computed=self._running.input_runs.num_images_computed,
            images_found=inputs.num_images_found,
            sources_computed=self._running.input_runs.num_sources_computed,
            sources_found=0 if sources is None else sources.num_found,
            input_bytes=inputs.used_bytes,
            snapshots=self._snapshotter.stats,
        )

    def check_integrity(self) -> None:
        """Assert that blocks and slots are accounted for; for tests and idle moments."""
        self._running.check_integrity()
        self._snapshotter.check_integrity(sequence.blocks for sequence in self._running)
        self._live.check_integrity()
        if self._kv.tiers is not None:
            live = self._live.by_id.values()
            fetches = [sequence.fetch for sequence in live if sequence.fetch is not None]
            self._kv.tiers.check_integrity([*fetches, *self._running.source_fetches()])

    def schedule(self, *, is_shared: bool = False) -> ScheduledBatch | None:
        """Return the next step; None if nothing can run.

        ``is_shared`` is True if streams of other models wait for the step.

        A step may be scheduled before the one before it has ended: tokens that are being chosen
        are then pending, and their sequences are assumed to go on unless they reach a length.
        Steps must end in the order in which they were scheduled, and no more than one may be in
        flight when another is scheduled. None while one is in flight may mean to end it first.

        Decode rows come first, then prefill chunks of running sequences, then admissions, within
        the token budget. When blocks run out the worst sequence is preempted, never a better one.
        """
        plan = self._planner.plan(is_shared=is_shared)
        if not (plan.num_tokens or plan.filled or plan.filled_states):
            return self.schedule_saves()
        for sequence in plan.num_tokens:
            if not sequence.group.has_started:
                sequence.group.has_started = True
                self._started.append(sequence.request.request_id)
        rows = planned_rows(plan)
        step_id = next(self._steps)
        captures = self._snapshotter.take_copies(plan, step_id)
        speculates = self._speculator is not None and bool(plan.num_tokens)
        taken_back = take_copies(self._running) if speculates else {}
        self._snapshotter.note(plan, step_id)
        self._in_flight[step_id] = {
            sequence.seq_id: sequence.row_in_flight()
            for sequence in (*plan.num_tokens, *plan.filling, *taken_back, *plan.block_copies)
        }
        return ScheduledBatch(
            step_id=step_id,
            sequences=tuple([schedule_row(sequence, count, plan) for sequence, count in rows]),
            block_copies=tuple(plan.block_copies.values()),
            state_copies=(
                *captures,
                *taken_back.values(),
                *self._snapshotter.take_restores(plan),
                *plan.state_copies.values(),
            ),
            num_captures=len(captures),
            ended=self._endings.take_constrained(),
            adapters={
                sequence.adapter_slot: sequence.adapter
                for sequence, _ in rows
                if sequence.adapter is not None
            },
            moves=self._moves(plan, step_id),
        )

    def _moves(self, plan: StepPlan, step_id: int) -> Moves:
        """Return what is moved and computed before a step."""
        moves = self._running.take_moves(step_id)
        if plan.filled or plan.filled_states:
            filled, states = tuple(plan.filled.items()), tuple(plan.filled_states.items())
            moves = replace(moves, filled=filled, filled_states=states)
        if self._kv.tiers is not None:
            num_computed = sum(plan.num_tokens.values()) // self._kv.block_size
            moves = self._kv.tiers.add_saves(moves, num_computed)
        return moves

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[SequenceUpdate]:
        """Apply a step's output; free the samples that ended."""
        tokens = by_sequence(output.tokens)
        rows = self._in_flight.pop(batch.step_id)
        if self._kv.tiers is not None:
            for content, data in output.saved:
                self._kv.tiers.put(content, data)
        self._running.end_moves(batch.step_id)
        # A sample that ends saves its snapshots, so they are found before.
        bad = self._snapshotter.end(batch.step_id, output.bad_slots)
        updates: list[SequenceUpdate] = []
        for row in batch.sequences:
            sequence, begun = self._live.by_id.get(row.seq_id), rows[row.seq_id]
            if output.failed and row.seq_id in output.failed:
                if sequence is None and row.sample is not None:
                    # The sample ended meanwhile, and no other continues from a decode row.
                    continue
                if sequence is not None and sequence.held is not None:
                    sequence.held.spoil()
                updates += self._endings.fail(begun.group, output.failed[row.seq_id])
                continue
            if row.target_ids:
                # Keep these even if the sample has ended: others may have forked from it.
                entries, at = output.prompt_logprobs[row.seq_id], row.start + row.target_start
                begun.group.add_prompt_logprobs(at, entries, begun.content)
            if sequence is not None:
                updates += self._results.apply(sequence, row, begun, tokens.get(row.seq_id, ()))
        return updates + [each for group in bad for each in self._endings.fail(group, BAD_STATE)]

    def fail(self, batch: ScheduledBatch, message: str) -> list[SequenceUpdate]:
        """End every request of a step that raised; its blocks do not enter the prefix cache.

        Requests that wait for an input that the step was to compute end too, and those of which it
        was to fill blocks or restore the state.
        """
        rows = self._in_flight.pop(batch.step_id).values()
        self._snapshotter.fail(batch.step_id)
        self._times.skip()
        slots = {slot for stages in batch.moves.stages for slot in stages.slots}
        groups = [begun.group for begun in rows]
        groups += [
            sequence.group
            for sequence in self._running
            if sequence.held is not None and sequence.held.has_any(slots)
        ]
        updates = [update for group in groups for update in self._endings.fail(group, message)]
        self._running.input_runs.forget(batch.moves)
        self._running.end_moves(batch.step_id, has_failed=True)
        if self._kv.tiers is not None:
            for _, content in batch.moves.saved + batch.moves.saved_states:
                self._kv.tiers.saves.fail(content)
        return updates

    def without_ended(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return a batch without the rows of sequences that have ended since it was scheduled."""
        rows = tuple(row for row in batch.sequences if row.seq_id in self._live.by_id)
        return replace(batch, sequences=rows)

    def check_room(self, client: str, n: int) -> None:
        """Refuse ``n`` samples if the queue is full and the client has its share of it.

        A client that fills the queue does not shut out the others: where several wait, each may
        have the queue's length over their number, even while it is full. Another thread may ask
        too; what it hears may be a step old.

        Raises:
            OverloadedError: there is no room.
        """
        self._live.check_room(client, n)
