"""Chooses what runs in the next step, and takes in what a step produced."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.live_requests import LiveRequests
from mlx_parallm.generation.scheduler.planner import Planner
from mlx_parallm.generation.scheduler.running import RunningSet
from mlx_parallm.generation.scheduler.sequence import RequestGroup, RowInFlight, Sequence
from mlx_parallm.generation.scheduler.speculating import Speculator
from mlx_parallm.generation.scheduler.step_cost import StepWork
from mlx_parallm.generation.scheduler.updates import SchedulerStats, SequenceUpdate
from mlx_parallm.generation.scheduler.waiting import WaitingQueue
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.events import FinishReason
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import SampledToken, ScheduledBatch, ScheduledSequence, StepOutput
from mlx_parallm.types.weights import PolicyWeights


class Scheduler:
    """Continuous batching with chunked prefill, forks and preemption by recomputation."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        has_state: bool = False,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self._kv = kv
        # The pool bounds a sequence too: one that has it all to itself must be able to end.
        self._max_len = min(max_model_len, kv.num_blocks * kv.block_size)
        self._has_state = has_state
        self._waiting = WaitingQueue()
        self._running = RunningSet(config, kv)
        self._live = LiveRequests(self._running, config.max_waiting)
        # What a model keeps besides blocks cannot be taken back.
        assert not (has_state and speculative), "a state cannot follow refused proposals"
        self._speculator = Speculator(speculative, kv, self._max_len)
        self._planner = Planner(
            config,
            kv,
            self._waiting,
            self._running,
            self._speculator,
            max_model_len=self._max_len,
            has_state=has_state,
        )
        self._constant = PolicyWeights()
        # By step in flight and seq_id; a sample may end before its step.
        self._in_flight: dict[int, dict[int, RowInFlight]] = {}
        self._steps = count()
        self._started: list[str] = []
        # Constrained ones that the runner was not told the end of.
        self._ended: list[int] = []

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
        self._check_fits(request)
        group = self._live.add(request, end_ids, weights or self._constant, seed)
        first, *others = group.sequences.values()
        self._waiting.append(first)
        if group.wants_fork:
            first.followers = others
        else:
            for sequence in others:
                self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks; False if it is not here."""
        group = self._live.groups.get(request_id)
        if group is None:
            return False
        sequences = list(group.sequences.values())
        # They wait in no queue; that they led one another, as in _end, would take n² steps.
        followers = {one for sequence in sequences for one in sequence.followers}
        for sequence in sequences:
            if sequence.slot is not None:
                self._running.stop(sequence)
            elif sequence not in followers:
                self._waiting.remove(sequence)
            self._forget(sequence)
        return True

    def finish(self, request_id: str, index: int) -> None:
        """End one sample for a reason found outside; unknown ones are ignored."""
        group = self._live.groups.get(request_id)
        if group is not None and index in group.sequences:
            self._end(group.sequences[index])

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """A step has ended.

        ``seconds`` is the time that the engine spent on it: from the end of the step before, or its
        own begin, until it was submitted, and waiting for its end.
        """
        if self._planner.cost is not None:
            rows = ((row.start, len(row.token_ids)) for row in batch.sequences)
            self._planner.cost.observe(StepWork.of(rows), seconds)

    def has_work(self) -> bool:
        """Whether any request is here."""
        return bool(self._live.groups)

    def has_request(self, request_id: str) -> bool:
        """Whether this request has not ended."""
        return request_id in self._live.groups

    def take_started(self) -> list[str]:
        """Ids of the requests scheduled for the first time since the last call."""
        started, self._started = self._started, []
        return started

    @property
    def adapters(self) -> AdapterSlots:
        """Which adapters are resident."""
        return self._running.adapters

    def refresh_weights(self) -> None:
        """Go on with what the weights of requests have become; between two steps."""
        self._planner.refresh_weights()

    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """Let no later sequence find what was computed before.

        ``reset_running``: what runs waits again, and is computed anew.
        """
        if reset_running:
            self._planner.preempt_all()
        self._kv.reset_prefix_cache()
        self._running.inputs.clear()

    def borrowed_block(self) -> AbstractContextManager[int | None]:
        """Return a context that holds a KV block; see ``KVCacheManager.borrowed_block``."""
        return self._kv.borrowed_block()

    def uses(self, content: str) -> bool:
        """Whether a request here is of this adapter."""
        return any(group.adapter == content for group in self._live.groups.values())

    def num_running(self, content: str) -> int:
        """Sequences that run with this adapter."""
        return self.adapters.users(content)

    @property
    def token_budget(self) -> int:
        """Most tokens of a step."""
        return self._planner.token_budget

    def stats(self) -> SchedulerStats:
        """How full it is."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=self._live.num_waiting,
            kv_usage=self._kv.usage,
            num_free_blocks=self._kv.num_free,
            num_blocks=self._kv.num_blocks,
            prefix_queries=self._planner.prefix_queries,
            prefix_hits=self._planner.prefix_hits,
            num_preemptions=self._planner.num_preemptions,
            speculation=self._speculator.stats(),
        )

    def check_integrity(self) -> None:
        """Assert that blocks and slots are accounted for; for tests and idle moments."""
        self._running.check_integrity()
        self._live.check_integrity()

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can run.

        A step may be scheduled before the one before it has ended: tokens that are being chosen
        are then pending, and their sequences are assumed to go on unless they reach a length.
        Steps must end in the order in which they were scheduled, and no more than one may be in
        flight when another is scheduled. None while one is in flight may mean to end it first.

        Decode rows come first, then prefill chunks of running sequences, then admissions, within
        the token budget. When blocks run out the worst sequence is preempted, never a better one.
        """
        plan = self._planner.plan()
        if not plan.num_tokens:
            return None
        for sequence in plan.num_tokens:
            if not sequence.group.has_started:
                sequence.group.has_started = True
                self._started.append(sequence.request.request_id)
        # Stable: rows of one token first, each part best first.
        rows = sorted(
            plan.num_tokens.items(), key=lambda row: row[1] > 1 or row[0] in plan.proposals
        )
        step_id = next(self._steps)
        held = self._running.inputs
        ended, self._ended = tuple(self._ended), []
        self._in_flight[step_id] = {sequence.seq_id: sequence.in_flight for sequence, _ in rows}
        batch = ScheduledBatch(
            step_id=step_id,
            sequences=tuple(
                sequence.schedule(
                    tokens,
                    plan.proposals.get(sequence, ()),
                    plan.draft_ends.get(sequence),
                    held.rows(
                        sequence.seq_id, sequence.num_computed, sequence.num_computed + tokens
                    ),
                )
                for sequence, tokens in rows
            ),
            block_copies=plan.block_copies,
            state_copies=plan.state_copies,
            ended=ended,
            adapters={
                sequence.adapter_slot: sequence.adapter
                for sequence, _ in rows
                if sequence.adapter is not None
            },
            inputs=held.take_changes(),
        )
        for sequence, _ in rows:
            held.pass_rows(sequence.seq_id, sequence.num_computed)
        return batch

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[SequenceUpdate]:
        """Take in a step's output; what ended is freed."""
        tokens: dict[int, list[SampledToken]] = {}
        for token in output.tokens:
            tokens.setdefault(token.seq_id, []).append(token)
        rows = self._in_flight.pop(batch.step_id)
        updates: list[SequenceUpdate] = []
        for row in batch.sequences:
            sequence, begun = self._live.get(row.seq_id), rows[row.seq_id]
            if output.failed and row.seq_id in output.failed:
                if sequence is None and row.sample is not None:
                    # It ended meanwhile, and nobody goes on from a row that only decoded.
                    continue
                updates += self._fail_group(begun.group, output.failed[row.seq_id])
                continue
            if row.target_ids:
                # Also of a sample that has ended: others may have forked from it.
                entries, at = output.prompt_logprobs[row.seq_id], row.start + row.target_start
                begun.group.add_prompt_logprobs(at, entries, begun.content)
            if sequence is not None:
                updates += self._advance(sequence, row, begun, tokens.get(row.seq_id, []))
        return updates

    def fail(self, batch: ScheduledBatch, message: str) -> list[SequenceUpdate]:
        """End every request of a step that raised; none of its blocks becomes cached."""
        rows = self._in_flight.pop(batch.step_id).values()
        updates = [update for begun in rows for update in self._fail_group(begun.group, message)]
        self._running.inputs.forget(batch.inputs)
        return updates

    def check_room(self, client: str, n: int) -> None:
        """Refuse ``n`` samples that the queue has no room for, but for a client's share of it.

        A client that fills the queue does not shut out the others: where several wait, each may
        have the queue's length over their number, even while it is full. Another thread may ask
        too; what it hears may be a step old.

        Raises:
            OverloadedError: there is no room.
        """
        self._live.check_room(client, n)

    def _check_fits(self, request: GenerateRequest) -> None:
        prompt_len, max_tokens = len(request.prompt_ids), request.params.max_tokens
        needed = prompt_len + (1 if max_tokens is None else max_tokens)
        if needed > self._max_len:
            detail = f"However, {needed} tokens were requested, prompt and completion together."
            raise ContextLengthError(self._max_len, detail)
        for each in request.inputs:
            if each.span and not each.may_cut and len(each.span) > self.token_budget:
                raise InvalidRequestError(
                    f"An input has {len(each.span)} rows, which one step must hold; this server's "
                    f"steps have {self.token_budget} tokens (--max-num-batched-tokens).",
                    param=each.kind.value,
                )

    def _advance(
        self,
        sequence: Sequence,
        row: ScheduledSequence,
        begun: RowInFlight,
        tokens: list[SampledToken],
    ) -> list[SequenceUpdate]:
        """One sequence's share of a step that succeeded."""
        end = row.start + len(row.token_ids) - len(row.verify)
        self._commit(sequence, begun, end)
        # It may have lost its blocks while the step was in flight, and even have got others.
        if row.draft is not None and sequence.table is begun.table:
            self._speculator.note_drafted(sequence, row.draft)
        if end < len(sequence.token_ids):
            return []
        if row.sample is None:
            updates = [self._update(sequence, row, None, FinishReason.LENGTH)]
        elif not tokens:
            return self._fail_group(sequence.group, "The step gave no token.")
        else:
            updates = self._take_tokens(sequence, row, tokens)
            num_accepted = len(updates) - 1
            sequence.settle(num_accepted)
            if row.verify:
                self._speculator.record(sequence, row, num_accepted)
            if num_accepted:
                self._commit(sequence, begun, end + num_accepted)
        if updates[-1].finish_reason is not None:
            self._end(sequence)
        return updates

    def _take_tokens(
        self, sequence: Sequence, row: ScheduledSequence, tokens: list[SampledToken]
    ) -> list[SequenceUpdate]:
        """Add tokens up to the one that ends the sample."""
        updates: list[SequenceUpdate] = []
        for token in tokens:
            reason = sequence.add_token(token, self._max_len)
            updates.append(self._update(sequence, row, token, reason))
            if reason is not None:
                break
        return updates

    def _commit(self, sequence: Sequence, begun: RowInFlight, num_computed: int) -> None:
        if sequence.table is begun.table and not self._has_state:
            self._kv.commit(sequence.blocks, sequence.token_ids, num_computed)

    def _update(
        self,
        sequence: Sequence,
        row: ScheduledSequence,
        token: SampledToken | None,
        reason: FinishReason | None,
    ) -> SequenceUpdate:
        return SequenceUpdate(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token=token,
            finish_reason=reason,
            stop_reason=None if reason is None else _stop_reason(sequence, token, reason),
            prompt=None if sequence.group.is_reported else sequence.group.take_prompt_event(),
            num_preemptions=sequence.num_preemptions,
            version=row.version,
        )

    def _fail_group(self, group: RequestGroup, message: str) -> list[SequenceUpdate]:
        """End every sample that is left of a request."""
        updates = [
            SequenceUpdate(request_id=group.request.request_id, index=index, error=message)
            for index in group.sequences
        ]
        for sequence in list(group.sequences.values()):
            self._end(sequence)
        return updates

    def _end(self, sequence: Sequence) -> None:
        """Forget a sample, wherever it is; the next one leads those that were to fork from it."""
        successor = None
        if sequence.followers:
            successor, *successor.followers = sequence.followers
        if sequence.slot is not None:
            self._running.stop(sequence)
            if successor is not None:
                self._waiting.push_front(successor)
        elif not self._waiting.remove(sequence, successor):
            leader = next(s for s in sequence.group.sequences.values() if sequence in s.followers)
            leader.followers.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Count a sample no more that neither runs nor waits."""
        self._live.forget(sequence)
        if sequence.request.params.grammar is not None:
            self._ended.append(sequence.seq_id)


def _stop_reason(
    sequence: Sequence, token: SampledToken | None, reason: FinishReason
) -> int | None:
    """The caller's own stop token; None for the model's end."""
    if reason is not FinishReason.STOP or token is None or token.token_id in sequence.group.end_ids:
        return None
    return token.token_id
