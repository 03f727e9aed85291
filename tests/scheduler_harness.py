"""Drives a scheduler with a simulated runner and checks what must hold after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.snapshots import StateSnapshots
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.generation.scheduler.updates import SequenceUpdate
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.events import FinishReason
from mlx_parallm.types.request import BaseWeights, GenerateRequest, PolicyWeights
from mlx_parallm.types.step import PENDING_TOKEN, ScheduledBatch, StepOutput, TokenLogprob
from tests.block_simulator import (
    END_ID,
    PLAIN,
    SimulatedRunner,
    expected_beams,
    expected_outputs,
    expected_prompt_logprobs,
    most_tokens,
)
from tests.dict_store import DictStore


@dataclass
class Tracked:
    """A request and what was heard of it."""

    request: GenerateRequest
    seed: int
    outputs: dict[int, list[int]]
    ended: set[int] = field(default_factory=set)
    num_prompt_events: int = 0
    num_cached: int = 0
    content: str = PLAIN


def make_kv(
    num_blocks: int,
    block_size: int,
    *,
    num_seqs: int,
    num_snapshots: int | None,
    has_kv: bool = True,
    caching: bool = True,
    tiers: Tiers | None = None,
) -> KVCacheManager:
    """Return a manager; ``num_snapshots``: of a model with a state, whose slots follow others'."""
    snapshots = None
    if num_snapshots and caching:
        snapshots = StateSnapshots(num_seqs, num_snapshots)
    has_cache = caching and (num_snapshots is None or snapshots is not None)
    return KVCacheManager(
        num_blocks,
        block_size,
        enable_prefix_caching=has_cache,
        tiers=tiers,
        snapshots=snapshots,
        has_kv=has_kv or snapshots is None,
    )


def evict(kv: KVCacheManager, num_blocks: int, num_snapshots: int) -> None:
    """Evict the least recently used blocks and snapshots, at most so many that are not held."""
    with ExitStack() as blocks:
        for _ in range(num_blocks):
            blocks.enter_context(kv.borrowed_block())
    snapshots = kv.snapshots
    if snapshots is not None:
        reserved = [snapshots.reserve() for _ in range(num_snapshots)]
        for slot in reserved:
            if slot is not None:
                snapshots.cancel(slot)


def is_end_forced(request: GenerateRequest, max_tokens: int, output: list[int]) -> bool:
    """Return True if the last token of an output was forced, since it is as long as it may be."""
    return request.params.forced_eos_id is not None and len(output) == max_tokens


class SchedulerHarness:
    """A scheduler, its runner and the requests given to it.

    With ``runs_ahead`` a step is scheduled before the one before it is taken in. Each step is said
    to have taken ``seconds_of`` it. With ``speculative`` the simulated model copies often, so that
    proposals are accepted. ``stores``: below its pool; ``lasting``: the content of its weights.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_model_len: int = 64,
        has_state: bool = False,
        keeps_states: bool = False,
        caching: bool = True,
        config: SchedulerConfig | None = None,
        runs_ahead: bool = False,
        seconds_of: Callable[[ScheduledBatch], float] = lambda batch: 1e-3 * batch.num_tokens,
        speculative: SpeculativeConfig | None = None,
        num_tower_stages: int = 1,
        has_sources: bool = False,
        stores: Sequence[BlockStore] = (),
        lasting: str | None = "digest",
        num_snapshots: int = 3,
        snapshot_tokens: int = 12,
        has_kv: bool = True,
        exports: Exports | None = None,
    ) -> None:
        self.speculative = speculative
        self.has_state, self.keeps_states = has_state, keeps_states
        self.config = config or SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
        self.max_len = min(max_model_len, num_blocks * block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.now_s = 0.0
        self.stores = stores
        has_stores = (bool(stores) or exports is not None) and caching
        draft = None
        if speculative is not None and speculative.model is not None:
            draft = PendingContent("draft")
        self.tiers = (
            Tiers(
                stores,
                block_bytes=100,
                state_bytes=250 if has_state else 0,
                draft=draft,
                exports=exports,
                min_saved=1,
                min_fetched=1,
                clock=lambda: self.now_s,
            )
            if has_stores
            else None
        )
        #: The weights of all requests.
        self.weights = PolicyWeights(
            BaseWeights(lasting=PendingContent(lasting), identity="identity")
        )
        self.kv = make_kv(
            num_blocks,
            block_size,
            caching=caching,
            tiers=self.tiers,
            num_seqs=self.config.max_num_seqs,
            num_snapshots=num_snapshots if has_state else None,
            has_kv=has_kv,
        )
        self.scheduler = Scheduler(
            self.config,
            self.kv,
            max_model_len=max_model_len,
            has_state=has_state,
            keeps_states=keeps_states,
            snapshot_tokens=snapshot_tokens,
            speculative=speculative,
            num_tower_stages=num_tower_stages,
            has_sources=has_sources,
        )
        self.runs_ahead = runs_ahead
        self.seconds_of = seconds_of
        self._in_flight: tuple[ScheduledBatch, StepOutput | None] | None = None
        self.batches: list[ScheduledBatch] = []
        self.tracked: dict[str, Tracked] = {}
        self._runner = SimulatedRunner(
            num_blocks,
            block_size,
            self.config.max_num_seqs + num_snapshots,
            has_state=has_state,
            has_kv=has_kv,
            keeps_states=keeps_states,
            copies=speculative is not None,
        )
        # The cache salt of every sample, by its number.
        self._salts: list[str | None] = []
        self._runner.key_of = lambda seq_id: self._salts[seq_id]

    def add(self, request: GenerateRequest, seed: int = 0) -> None:
        """Queue a request; ``END_ID`` is the model's end."""
        ends = frozenset[int]() if request.params.ignore_eos else frozenset({END_ID})
        self.scheduler.add(request, seed=seed, end_ids=ends, weights=self.weights)
        self._salts += [request.cache_salt] * request.params.num_sequences
        outputs: dict[int, list[int]] = {index: [] for index in range(request.params.n)}
        self.tracked[request.request_id] = Tracked(request, seed, outputs)

    def abort(self, request_id: str) -> None:
        """Abort a request and hear no more of it."""
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.has_request(request_id)
        del self.tracked[request_id]

    def finish(self, request_id: str, index: int) -> None:
        """End one sample from outside, or all beams of a request."""
        self.scheduler.finish(request_id, index)
        tracked = self.tracked[request_id]
        has_beams = tracked.request.params.beams is not None
        tracked.ended |= tracked.outputs.keys() if has_beams else {index}
        self._forget_if_done(request_id)

    def schedule(self) -> ScheduledBatch | None:
        """Return the next batch, checked."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self.batches.append(batch)
            self._check_batch(batch)
        return batch

    def step(
        self, *, raises: bool = False, fail_rows: int = 0, spoils: bool = False
    ) -> ScheduledBatch | None:
        """Run one step: whole, raising, or with its first ``fail_rows`` sequences failed.

        ``spoils``: the snapshots that it makes have a NaN. The batch that was begun or, if there is
        none, ended.
        """
        batch = self.schedule()
        if batch is not None:
            self.run(batch, raises=raises, fail_rows=fail_rows, spoils=spoils)
        elif self._in_flight is not None:
            batch = self._in_flight[0]
            self._take_in(None)
        self.scheduler.check_integrity()
        return batch

    def run(
        self,
        batch: ScheduledBatch,
        *,
        raises: bool = False,
        fail_rows: int = 0,
        spoils: bool = False,
    ) -> None:
        """Run a batch, and take in what it or, when running ahead, the one before gave."""
        output = None
        if raises:
            self._runner.corrupt(batch)
        else:
            failed = frozenset(row.seq_id for row in batch.sequences[:fail_rows])
            captures = batch.state_copies[: batch.num_captures] if spoils else ()
            bad_slots = frozenset(target for _, target in captures)
            output = self._runner.run(batch, failed, bad_slots)
        self._take_in((batch, output))

    def _take_in(self, begun: tuple[ScheduledBatch, StepOutput | None] | None) -> None:
        ending = begun
        if self.runs_ahead:
            ending, self._in_flight = self._in_flight, begun
        if ending is None:
            return
        batch, output = ending
        if output is None:
            updates = self.scheduler.fail(batch, "raised")
        else:
            self.scheduler.observe(batch, self.seconds_of(batch))
            updates = self.scheduler.update(batch, output)
        for update in updates:
            self._hear(update)

    def settle(self) -> None:
        """Take in the step in flight, if there is one."""
        self._take_in(None)

    def drain(self, limit: int = 3000) -> None:
        """Step until nothing is left; every sample must have ended, every block be free."""
        for _ in range(limit):
            if not self.scheduler.has_work() and self._in_flight is None:
                break
            if self.step() is None:
                assert self.complete(), "there is work, but nothing runs"
        assert not self.scheduler.has_work(), "it does not end"
        assert not self.tracked, "a sample was never reported as ended"
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
        assert stats.num_free_blocks == self.num_blocks
        if self.tiers is not None:
            self.tiers.check_integrity([])

    def complete(self) -> bool:
        """Let stores return what they were asked for; False if no sequence waits for any."""
        held_back = [store for store in self.stores if isinstance(store, DictStore)]
        is_awaited = any(store.fetches for store in held_back)
        for store in held_back:
            store.complete()
        return is_awaited

    def _check_batch(self, batch: ScheduledBatch) -> None:
        limit = max(self.config.max_num_batched_tokens or 1024, self.config.max_num_seqs)
        assert batch.num_tokens <= limit
        self._check_proposals(batch)
        slots = [row.slot for row in batch.sequences]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.config.max_num_seqs for slot in slots)
        assert all(row.token_ids for row in batch.sequences)
        sizes = [len(row.token_ids) > 1 for row in batch.sequences]
        assert sizes == sorted(sizes), "a prefill chunk comes before a single row"
        targets = [target for _, target in batch.block_copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _ in batch.block_copies}

    def _check_proposals(self, batch: ScheduledBatch) -> None:
        rows = [row for row in batch.sequences if row.verify]
        if not rows:
            return
        assert self.speculative is not None
        assert len(rows) <= (self.speculative.disable_by_batch_size or 32)
        for row in rows:
            assert len(row.verify) <= self.speculative.num_speculative_tokens
            if row.kept_slots and not self.keeps_states:
                assert len(row.kept_slots) == 1
                assert len(row.token_ids) <= 2 * (self.speculative.num_speculative_tokens + 1)
            else:
                assert len(row.kept_slots) == self.has_state * len(row.verify)
                assert len(row.token_ids) == len(row.verify) + 1
            assert row.token_ids[0] != PENDING_TOKEN
            assert (PENDING_TOKEN in row.proposals) == (self.speculative.model is not None)
            end = row.start + len(row.token_ids)
            assert end < self.max_len
            assert end <= len(row.block_table) * self.block_size

    def _hear(self, update: SequenceUpdate) -> None:
        tracked = self.tracked.get(update.request_id)
        assert tracked is not None, "an update of a request that has ended"
        assert update.index not in tracked.ended
        if update.prompt is not None:
            tracked.num_prompt_events += 1
            tracked.num_cached = update.prompt.num_cached_tokens
            wanted = tracked.request.params.prompt_logprobs is not None
            self._check_prompt(tracked, update.prompt.prompt_logprobs if wanted else ())
        if update.token is not None:
            assert tracked.num_prompt_events == 1
            tokens = (*update.earlier, update.token)
            tracked.outputs[update.index] += [token.token_id for token in tokens]
        if update.finish_reason is not None:
            self._check_output(tracked, update)
        if update.finish_reason is not None or update.error is not None:
            tracked.ended.add(update.index)
            self._forget_if_done(update.request_id)

    def _check_prompt(
        self, tracked: Tracked, entries: tuple[TokenLogprob | None, ...] | None
    ) -> None:
        assert entries is not None
        if tracked.request.params.prompt_logprobs is not None:
            assert list(entries) == expected_prompt_logprobs(tracked.request)

    def _check_output(self, tracked: Tracked, update: SequenceUpdate) -> None:
        if tracked.request.params.beams is not None:
            self._check_beam(tracked, update)
            return
        expected = expected_outputs(
            tracked.request,
            update.index,
            tracked.seed,
            self.max_len,
            copies=self.speculative is not None,
            content=tracked.content,
        )
        assert tracked.outputs[update.index] == expected, "another output than alone"
        last = expected[-1] if expected else None
        stops = tracked.request.params.stop_token_ids
        if is_end_forced(tracked.request, most_tokens(tracked.request, self.max_len), expected):
            ends = (*stops, *(() if tracked.request.params.ignore_eos else (END_ID,)))
            assert (update.finish_reason, update.stop_reason) == (FinishReason.LENGTH, None)
            assert update.is_forced_end is (last in ends)
            return
        assert not update.is_forced_end
        if last == END_ID and not tracked.request.params.ignore_eos:
            assert (update.finish_reason, update.stop_reason) == (FinishReason.STOP, None)
        elif last in stops:
            assert (update.finish_reason, update.stop_reason) == (FinishReason.STOP, last)
        else:
            assert (update.finish_reason, update.stop_reason) == (FinishReason.LENGTH, None)

    def _check_beam(self, tracked: Tracked, update: SequenceUpdate) -> None:
        request = tracked.request
        longest = self.longest_beam(request) - len(request.prompt_ids)
        max_tokens = longest if request.params.max_tokens is None else request.params.max_tokens
        expected = expected_beams(request, max_tokens, tracked.content)
        texts = [list(text) for text, _ in expected] + [[]] * request.params.n
        actual = tracked.outputs[update.index]
        assert actual == texts[update.index], "other beams than alone"
        ends = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ends |= {END_ID}
        is_end = bool(actual) and actual[-1] in ends
        is_forced = is_end_forced(request, max_tokens, actual)
        assert update.is_forced_end is (is_end and is_forced)
        is_stopped = is_end and not is_forced
        assert update.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)

    def longest_beam(self, request: GenerateRequest) -> int:
        """Return the most tokens of a beam that fit if all are so long and share the prompt."""
        beams, length = request.params.beams, self.max_len
        assert beams is not None
        shared = len(request.prompt_ids) // self.block_size
        while True:
            own = -(-length // self.block_size) - shared
            if shared + beams.width * own <= self.num_blocks:
                return length
            length -= 1

    def _forget_if_done(self, request_id: str) -> None:
        tracked = self.tracked[request_id]
        if len(tracked.ended) == tracked.request.params.n:
            assert not self.scheduler.has_request(request_id)
            del self.tracked[request_id]
