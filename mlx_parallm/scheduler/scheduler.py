"""Chooses what runs in the next step, and takes in what a step produced."""

from __future__ import annotations

import heapq
from itertools import count

from mlx_parallm.batch import SampledToken, ScheduledBatch, ScheduledSequence, StepOutput
from mlx_parallm.config import SchedulerConfig
from mlx_parallm.errors import ContextLengthError, InvalidRequestError, OverloadedError
from mlx_parallm.kv_cache.block_table import BlockTable
from mlx_parallm.kv_cache.manager import KVCacheManager
from mlx_parallm.outputs import FinishReason
from mlx_parallm.request import GenerateRequest
from mlx_parallm.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.scheduler.step_plan import StepPlan
from mlx_parallm.scheduler.updates import SchedulerStats, SequenceUpdate
from mlx_parallm.scheduler.waiting import WaitingQueue

# In the first round a prompt gets this share of the token budget at most, so that short prompts
# are not kept waiting by a long one; what is left over goes to whoever is not done.
FIRST_ROUND_SHARE = 4


class Scheduler:
    """Continuous batching with chunked prefill, forks and preemption by recomputation."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        has_state: bool = False,
    ) -> None:
        self._config = config
        # Decode rows always fit: a step that could not hold them all would starve some.
        self._token_budget = max(config.max_num_batched_tokens, config.max_num_seqs)
        self._kv = kv
        # The pool bounds a sequence too: one that has it all to itself must be able to end.
        self._max_len = min(max_model_len, kv.num_blocks * kv.block_size)
        self._has_state = has_state
        self._groups: dict[str, RequestGroup] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._free_slots = list(range(config.max_num_seqs))
        self._by_id: dict[int, Sequence] = {}
        self._seq_ids = count()
        self._arrivals = count()
        self._steps = count()
        self._started: list[str] = []
        self._num_followers = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._num_preemptions = 0

    def add(self, request: GenerateRequest, *, seed: int, end_ids: frozenset[int]) -> None:
        """Queue a request; sample i uses ``seed + i``.

        Args:
            request: its id must not be in use.
            seed: of the first sample.
            end_ids: tokens that end a sample, besides ``stop_token_ids``.

        Raises:
            ContextLengthError: it can never fit the context or the pool.
            OverloadedError: too many sequences wait.
        """
        params = request.params
        self._check_fits(request)
        waiting = len(self._waiting) + self._num_followers
        if waiting + params.n > self._config.max_waiting:
            raise OverloadedError(f"{waiting} sequences are waiting already.")
        if request.request_id in self._groups:
            raise InvalidRequestError("The request id is in use.", param="request_id")
        group = RequestGroup(request, end_ids, next(self._arrivals))
        for index in range(params.n):
            sequence = Sequence(
                next(self._seq_ids), group, index, seed + index, list(request.prompt_ids)
            )
            group.sequences[index] = sequence
            self._by_id[sequence.seq_id] = sequence
        self._groups[request.request_id] = group
        first, *others = group.sequences.values()
        self._waiting.append(first)
        if group.wants_fork:
            first.followers = others
            self._num_followers += len(others)
        else:
            for sequence in others:
                self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks; False if it is not here."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        for sequence in list(group.sequences.values()):
            self._end(sequence)
        return True

    def finish(self, request_id: str, index: int) -> None:
        """End one sample for a reason found outside; unknown ones are ignored."""
        group = self._groups.get(request_id)
        if group is not None and index in group.sequences:
            self._end(group.sequences[index])

    def has_work(self) -> bool:
        """Whether any request is here."""
        return bool(self._groups)

    def has_request(self, request_id: str) -> bool:
        """Whether this request has not ended."""
        return request_id in self._groups

    def take_started(self) -> list[str]:
        """Ids of the requests scheduled for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def stats(self) -> SchedulerStats:
        """How full it is."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + self._num_followers,
            kv_usage=self._kv.usage,
            num_free_blocks=self._kv.num_free,
            num_blocks=self._kv.num_blocks,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_preemptions=self._num_preemptions,
        )

    def check_integrity(self) -> None:
        """Assert that blocks and slots are accounted for; for tests and idle moments."""
        tables = [s.table for s in self._running if s.table is not None]
        assert len(tables) == len(self._running)
        self._kv.check_integrity(tables)
        slots = [s.slot for s in self._running] + self._free_slots
        assert sorted(slots) == list(range(self._config.max_num_seqs))  # type: ignore[type-var]

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can run.

        Decode rows come first, then prefill chunks of running sequences, then admissions, within
        the token budget. When blocks run out the worst sequence is preempted, never a better one.
        """
        plan = StepPlan(self._token_budget)
        self._running.sort(key=lambda sequence: sequence.order)
        for sequence in [s for s in self._running if s.num_remaining == 1]:
            if sequence.slot is not None and self._make_room(sequence, 1, plan):
                plan.add(sequence, 1)
        self._fork_followers(plan)
        self._plan_prefill(plan)
        self._admit(plan)
        plan.spread_rest(lambda one, tokens: self._kv.grow(_table(one), one.num_computed + tokens))
        return self._build(plan)

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[SequenceUpdate]:
        """Take in a step's output; what ended is freed."""
        tokens = {token.seq_id: token for token in output.tokens}
        updates: list[SequenceUpdate] = []
        for row in batch.sequences:
            sequence = self._by_id.get(row.seq_id)
            if sequence is None:
                continue
            if row.seq_id in output.failed:
                updates += self._fail_group(sequence.group, output.failed[row.seq_id])
            else:
                entries = output.prompt_logprobs.get(row.seq_id, ())
                sequence.add_prompt_logprobs(row.start, entries)
                updates += self._advance(sequence, row, tokens.get(row.seq_id))
        return updates

    def fail(self, batch: ScheduledBatch, message: str) -> list[SequenceUpdate]:
        """End every request of a step that raised; none of its blocks becomes cached."""
        updates: list[SequenceUpdate] = []
        for row in batch.sequences:
            sequence = self._by_id.get(row.seq_id)
            if sequence is not None:
                updates += self._fail_group(sequence.group, message)
        return updates

    def _check_fits(self, request: GenerateRequest) -> None:
        prompt_len, max_tokens = len(request.prompt_ids), request.params.max_tokens
        needed = prompt_len + (1 if max_tokens is None else max_tokens)
        if needed > self._max_len:
            detail = f"However, {needed} tokens were requested, prompt and completion together."
            raise ContextLengthError(self._max_len, detail)

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Give a running sequence blocks for its next tokens, preempting worse ones if it must.

        A sequence for which no worse one can make room is itself preempted, unless it is the only
        one, which always fits.
        """
        while not self._kv.grow(_table(sequence), sequence.num_computed + num_tokens):
            others = [one for one in self._running if one not in plan.num_tokens]
            victim = max(others, key=lambda one: one.order)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        self._release(sequence)
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        plan.has_preempted = True
        self._waiting.push_front(sequence)

    def _plan_prefill(self, plan: StepPlan) -> None:
        """The next chunks of running prompts, each a share of the budget at most."""
        for sequence in [s for s in self._running if s not in plan.num_tokens]:
            tokens = min(sequence.num_schedulable, self._first_round(), plan.budget_left)
            # A better sequence may have preempted this one meanwhile.
            if tokens > 0 and sequence.slot is not None and self._make_room(sequence, tokens, plan):
                plan.add(sequence, tokens)

    def _first_round(self) -> int:
        return max(1, self._token_budget // FIRST_ROUND_SHARE)

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting sequences while there are slots, blocks for their prompts, and budget."""
        while self._free_slots and plan.budget_left > 0 and not plan.has_preempted:
            sequence = self._waiting.peek(self._client_may_run)
            if sequence is None or not self._try_start(sequence):
                return
            tokens = min(sequence.num_schedulable, self._first_round(), plan.budget_left)
            self._kv.grow(_table(sequence), sequence.num_computed + tokens)
            plan.add(sequence, tokens)

    def _client_may_run(self, sequence: Sequence) -> bool:
        limit = self._config.max_num_seqs_per_client
        if limit is None:
            return True
        client = sequence.request.client
        return sum(one.request.client == client for one in self._running) < limit

    def _try_start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and its cached prefix, if its whole prompt has room."""
        wants_all = sequence.request.params.prompt_logprobs is not None
        table = self._kv.new_table(
            sequence.token_ids,
            sequence.group.salt,
            use_cache=not (self._has_state or wants_all),
        )
        missing = self._kv.blocks_for(len(sequence.token_ids)) - len(table.blocks)
        if missing > self._kv.num_free:
            self._kv.free(table)
            return False
        self._waiting.admit(sequence)
        sequence.table = table
        sequence.num_computed = len(table.blocks) * self._kv.block_size
        self._count_prefix(sequence)
        self._occupy(sequence)
        return True

    def _count_prefix(self, sequence: Sequence) -> None:
        if not sequence.output_ids:
            self._prefix_queries += len(sequence.token_ids)
            self._prefix_hits += sequence.num_computed
        if sequence.group.num_cached_tokens is None:
            sequence.group.num_cached_tokens = sequence.num_computed

    def _occupy(self, sequence: Sequence) -> None:
        sequence.slot = heapq.heappop(self._free_slots)
        self._running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and slot."""
        assert sequence.slot is not None
        self._kv.free(_table(sequence))
        heapq.heappush(self._free_slots, sequence.slot)
        self._running.remove(sequence)
        sequence.table, sequence.slot, sequence.num_computed = None, None, 0

    def _fork_followers(self, plan: StepPlan) -> None:
        """Let samples begin from the leader that has computed all but the last prompt token."""
        for leader in [one for one in plan.num_tokens if one.followers]:
            followers, leader.followers = leader.followers, []
            self._num_followers -= len(followers)
            for position, follower in enumerate(followers):
                if not self._fork(leader, follower, plan):
                    # The rest come in through the prefix cache when there is room.
                    for late in reversed(followers[position:]):
                        self._waiting.push_front(late)
                    break

    def _fork(self, leader: Sequence, follower: Sequence, plan: StepPlan) -> bool:
        if not self._free_slots or plan.budget_left < 1 or not self._client_may_run(follower):
            return False
        forked = self._kv.fork(_table(leader), leader.num_computed)
        if forked is None:
            return False
        table, block_copy = forked
        if not self._kv.grow(table, leader.num_computed + 1):
            self._kv.free(table)
            return False
        follower.table, follower.num_computed = table, leader.num_computed
        self._occupy(follower)
        plan.add(follower, 1)
        if block_copy is not None:
            plan.block_copies.append(block_copy)
        if self._has_state and leader.slot is not None and follower.slot is not None:
            plan.state_copies.append((leader.slot, follower.slot))
        return True

    def _build(self, plan: StepPlan) -> ScheduledBatch | None:
        if not plan.num_tokens:
            return None
        for sequence in plan.num_tokens:
            if not sequence.group.has_started:
                sequence.group.has_started = True
                self._started.append(sequence.request.request_id)
        return ScheduledBatch(
            step_id=next(self._steps),
            sequences=tuple(s.schedule(tokens) for s, tokens in plan.num_tokens.items()),
            block_copies=tuple(plan.block_copies),
            state_copies=tuple(plan.state_copies),
        )

    def _advance(
        self, sequence: Sequence, row: ScheduledSequence, token: SampledToken | None
    ) -> list[SequenceUpdate]:
        """One sequence's share of a step that succeeded."""
        sequence.num_computed += len(row.token_ids)
        if not self._has_state:
            self._kv.commit(_table(sequence), sequence.token_ids, sequence.num_computed)
        if sequence.num_remaining > 0:
            return []
        reason: FinishReason | None = FinishReason.LENGTH
        if row.sample is not None:
            if token is None:
                return self._fail_group(sequence.group, "The step gave no token.")
            reason = sequence.add_token(token, self._max_len)
        update = SequenceUpdate(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token=token,
            finish_reason=reason,
            stop_reason=_stop_reason(sequence, token, reason),
            prompt=sequence.group.take_prompt_event(),
            num_preemptions=sequence.num_preemptions,
        )
        if reason is not None:
            self._end(sequence)
        return [update]

    def _fail_group(self, group: RequestGroup, message: str) -> list[SequenceUpdate]:
        updates = [
            SequenceUpdate(request_id=group.request.request_id, index=index, error=message)
            for index in group.sequences
        ]
        for sequence in list(group.sequences.values()):
            self._end(sequence)
        return updates

    def _end(self, sequence: Sequence) -> None:
        """Forget a sample, wherever it is; samples that were to fork from it wait on their own."""
        if sequence.slot is not None:
            self._release(sequence)
        elif not self._waiting.remove(sequence):
            leader = next(s for s in sequence.group.sequences.values() if sequence in s.followers)
            leader.followers.remove(sequence)
            self._num_followers -= 1
        self._num_followers -= len(sequence.followers)
        for follower in sequence.followers:
            self._waiting.append(follower)
        sequence.followers = []
        del self._by_id[sequence.seq_id]
        group = sequence.group
        del group.sequences[sequence.index]
        if not group.sequences:
            del self._groups[group.request.request_id]


def _table(sequence: Sequence) -> BlockTable:
    assert sequence.table is not None, "a running sequence has a table"
    return sequence.table


def _stop_reason(
    sequence: Sequence, token: SampledToken | None, reason: FinishReason | None
) -> int | None:
    """The caller's own stop token; None for the model's end."""
    if reason is not FinishReason.STOP or token is None or token.token_id in sequence.group.end_ids:
        return None
    return token.token_id
