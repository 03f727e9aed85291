"""A request's samples and their progress."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mlx_parallm.engine.adapter_slots import NO_ADAPTER
from mlx_parallm.generation.inputs.held import Held
from mlx_parallm.generation.inputs.prompt_inputs import PromptInputs
from mlx_parallm.generation.kv_cache.blocks import BlockTable, Tail
from mlx_parallm.generation.kv_cache.fetches import ChainFetch
from mlx_parallm.generation.kv_cache.tiers import ArrivedBlock
from mlx_parallm.generation.scheduler.beam_search import candidate_params
from mlx_parallm.generation.scheduler.source_reads import SourceKey, SourceRead
from mlx_parallm.generation.scheduler.token_rules import TokenRules
from mlx_parallm.generation.speculation import Speculation
from mlx_parallm.types.events import FinishReason, PromptEvent
from mlx_parallm.types.model_input import ModelInput
from mlx_parallm.types.request import GenerateRequest, PolicyWeights, SamplingParams
from mlx_parallm.types.step import (
    SampledToken,
    ScheduledSequence,
    TokenLogprob,
)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request and what its samples share.

    Attributes:
        request: as submitted.
        end_ids: tokens that end a sample, besides the caller's own stop tokens.
        arrival: consecutive number of the request.
        weights: what it is computed with.
        sequences: the samples that have not ended, by index.
        content: of the weights that computed what is known of the prompt; None before any did.
        prompt_logprobs: of the prompt's tokens so far; None of those that are not scored, as the
            first, which follows nothing.
        num_cached_tokens: prompt tokens that the first sample found in the prefix cache.
        num_newly_cached_tokens: prompt tokens that it has put into the prefix cache; more if some
            were evicted and computed again.
        has_started: whether any of it was ever scheduled.
        is_reported: whether its PromptEvent was sent.
        inputs: its inputs besides tokens.
        known_ids: the prompt's tokens, without rows of inputs.
        row_params: what its rows are sampled with: those of beams report candidates.
        awaits_tokens: True if a row needs to know the tokens before it, and so waits for the step
            in flight.
    """

    request: GenerateRequest
    end_ids: frozenset[int]
    arrival: int
    weights: PolicyWeights = field(default_factory=PolicyWeights)
    sequences: dict[int, Sequence] = field(default_factory=dict[int, "Sequence"])
    content: str | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(init=False)
    num_cached_tokens: int | None = None
    num_newly_cached_tokens: int = 0
    has_started: bool = False
    is_reported: bool = False
    inputs: PromptInputs = field(init=False)
    known_ids: tuple[int, ...] = field(init=False)
    row_params: SamplingParams = field(init=False)
    awaits_tokens: bool = field(init=False)

    def __post_init__(self) -> None:
        self._forget_prompt()
        self.row_params = params = self.request.params
        self.awaits_tokens = params.beams is not None or params.no_repeat_ngram_size > 0
        if params.beams is not None:
            self.row_params = candidate_params(params, params.beams, len(self.stop_ids))
        self.inputs = inputs = PromptInputs(self.request.inputs)
        self.known_ids = self.request.prompt_ids
        if inputs:
            tokens = enumerate(self.request.prompt_ids)
            self.known_ids = tuple(token for place, token in tokens if inputs.is_token(place))

    def _forget_prompt(self) -> None:
        start = min(self.request.params.prompt_logprobs_start, len(self.request.prompt_ids))
        self.prompt_logprobs = [None] * max(1, start)
        self.num_cached_tokens = None
        self.num_newly_cached_tokens = 0

    @property
    def salt(self) -> bytes:
        """Return the salt of its block hashes: scope, weights, salts and inputs without rows."""
        return self._salt(self.weights.content)

    @property
    def lasting_salt(self) -> bytes | None:
        """Return ``salt`` as every process has it; None if its blocks must not leave this one."""
        content = self.weights.lasting_content
        return None if content is None else self._salt(content)

    def _salt(self, content: str) -> bytes:
        request = self.request
        return request.scope.content_key(
            content, request.cache_salt or None, request.extra_key, self.inputs.salt
        )

    @property
    def adapter(self) -> str | None:
        """Return the content of the adapter that it needs now; None for none."""
        return None if self.weights.adapter is None else self.weights.adapter.content

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return all tokens that end a sample."""
        return self.end_ids.union(self.request.params.stop_token_ids)

    def has_end(self, token: SampledToken | None) -> bool:
        """Return True for a token that ends a sample where it is chosen freely."""
        return token is not None and token.token_id in self.stop_ids

    @property
    def source(self) -> ModelInput | None:
        """Return its source; None without one."""
        return self.inputs.whole[0] if self.inputs.whole else None

    @property
    def source_key(self) -> SourceKey:
        """Return what the KV of its source depends on now."""
        owner = None if self.weights.is_cached else self.arrival
        return SourceKey(self.salt, self.lasting_salt, self.adapter, owner)

    @property
    def wants_fork(self) -> bool:
        """Return True if several samples share one prefill, of all but the last prompt token."""
        num_shared = len(self.request.prompt_ids) - 1
        if self.request.params.n == 1 or num_shared == 0:
            return False
        return self.inputs.cut(0, num_shared) == num_shared

    def refresh_weights(self) -> None:
        """Drop prompt results of other weights, unless they are final already.

        All that is reported of a prompt is thus computed by one version.
        """
        is_final = self.is_reported or any(
            sequence.has_begun for sequence in self.sequences.values()
        )
        if not is_final and self.content != self.weights.content:
            self.content = self.weights.content
            self._forget_prompt()

    def add_prompt_logprobs(
        self, start: int, entries: tuple[TokenLogprob, ...], content: str
    ) -> None:
        """Keep the log-probabilities of targets at ``start + 1 ..`` that are not known yet.

        Entries of weights that no longer compute the prompt are dropped.
        """
        if content == self.content:
            known = self.prompt_logprobs
            known += entries[len(known) - start - 1 :]

    @property
    def num_reusable(self) -> int:
        """Return how many leading tokens may be cached; rows that score targets are computed."""
        known = len(self.prompt_logprobs)
        is_unscored = self.request.params.prompt_logprobs is None
        if is_unscored or known >= len(self.request.prompt_ids):
            return sys.maxsize
        return known - 1

    def take_prompt_event(self) -> PromptEvent:
        """Return the PromptEvent, which is sent once."""
        self.is_reported = True
        has_logprobs = self.request.params.prompt_logprobs is not None
        num_cached = self.num_cached_tokens or 0
        num_computed = len(self.request.prompt_ids) - num_cached
        return PromptEvent(
            request_id=self.request.request_id,
            num_cached_tokens=num_cached,
            num_newly_cached_tokens=max(0, min(self.num_newly_cached_tokens, num_computed)),
            prompt_logprobs=tuple(self.prompt_logprobs) if has_logprobs else None,
        )


class RowInFlight(NamedTuple):
    """A sequence's state when a step of it was scheduled; it may have changed since.

    Steps share it until the sequence has other blocks or other weights.
    """

    group: RequestGroup
    table: BlockTable
    content: str


class Arrival(Protocol):
    """Something that a sequence waits for: the product of an input, or blocks that are read.

    It wakes the engine's loop when it is there.
    """

    def is_awaited(self, position: int) -> bool:
        """Return True if the row at a position cannot run yet."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request.

    Attributes:
        seq_id: unique in the scheduler for ever.
        group: what it shares with the other samples of its request.
        index: which sample.
        seed: of this sample.
        request: the request.
        length_limit: the number of known tokens at which it ends, whatever the last one is; the
            context may end before.
        token_ids: prompt and output, as far as they are known; shared until there is output.
        output_ids: output only.
        num_computed: leading tokens whose KV (and state) exists, or will once the steps in flight
            have ended.
        num_pending: tokens that steps in flight are choosing.
        num_kept: leading tokens after which its state was kept last, or found.
        tail: what it left when it was preempted; None if it left nothing, and while it runs.
        num_drafted: leading tokens that a draft model has computed, or is going to.
        num_proposed: proposals that the step in flight verifies; any number of them becomes tokens.
        restored_from: the slot with the state at ``num_computed``, which the next batch copies to
            its own, because proposals were refused; None if its own slot has it.
        replay_end: tokens before this position run again, because the state after them was not
            kept.
        speculation: makes its proposals; None before the first.
        table: its blocks while running.
        slot: its slot while running.
        held: the products of inputs that it holds while running; None without inputs.
        fetch: the chain that is read for it, until the blocks are filled; None if none is.
        source_read: the chain of its source that is read, until it runs; None if none is.
        arrived: what its next blocks are filled with, while running.
        arrivals: what it waits for: blocks that are read for it or for another one, until it runs;
            then products of inputs.
        content: of the weights that compute its blocks, while running.
        is_caught_up: whether its last token has been computed, or is being computed, since it has
            these blocks.
        adapter: whose slot it has while running; None for none.
        adapter_slot: that slot; 0 for none.
        place: in its client's line while it waits; a smaller one goes first.
        blocked_at: free blocks that were too few to start it; not tried again with fewer.
        rules: for the token after those that are known.
        order: better sequences have a smaller one: by priority, then arrival, then sample.
        followers: samples that will fork from this one once all but the last prompt token is
            computed; empty for all but the first of several.
        fork_at: the number of computed tokens at which it waits for other beams to fork; 0 if none
            do.
    """

    seq_id: int
    group: RequestGroup
    index: int
    seed: int
    token_ids: list[int]
    output_ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_pending: int = 0
    num_kept: int = 0
    tail: Tail | None = None
    num_drafted: int = 0
    num_proposed: int = 0
    restored_from: int | None = None
    replay_end: int = 0
    speculation: Speculation | None = None
    table: BlockTable | None = None
    slot: int | None = None
    held: Held | None = None
    fetch: ChainFetch | None = None
    source_read: SourceRead | None = None
    arrived: deque[ArrivedBlock] = field(default_factory=deque[ArrivedBlock])
    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    content: str = ""
    is_caught_up: bool = False
    adapter: str | None = None
    adapter_slot: int = NO_ADAPTER
    place: int = 0
    blocked_at: int = 0
    request: GenerateRequest = field(init=False)
    length_limit: int = field(init=False)
    rules: TokenRules = field(init=False)
    order: tuple[int, int, int] = field(init=False)
    followers: list[Sequence] = field(default_factory=list["Sequence"])
    fork_at: int = 0
    _row_in_flight: RowInFlight | None = None

    def __post_init__(self) -> None:
        group = self.group
        # Every row of every step reads these, so they are no properties.
        self.request = request = group.request
        max_tokens = request.params.max_tokens
        self.length_limit = sys.maxsize
        if max_tokens is not None:
            self.length_limit = len(request.prompt_ids) + max_tokens
        self.rules = TokenRules(group.row_params, group.end_ids, group.known_ids)
        self.order = (request.priority, group.arrival, self.index)

    @property
    def blocks(self) -> BlockTable:
        """Return the block table of a running sequence."""
        assert self.table is not None, "a running sequence has a table"
        return self.table

    @property
    def is_blocked(self) -> bool:
        """Return True if its next row waits for something to arrive."""
        position = self.num_computed
        return any(arrival.is_awaited(position) for arrival in self.arrivals)

    @property
    def has_begun(self) -> bool:
        """Return True if there is output, or a step in flight makes some or the end."""
        return bool(self.output_ids or self.num_pending or self.is_caught_up)

    @property
    def num_remaining(self) -> int:
        """Return how many tokens to compute before the next one can be sampled."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def num_replayed(self) -> int:
        """Return how many tokens run again before its last one."""
        return max(self.replay_end - self.num_computed, 0)

    @property
    def is_decoding(self) -> bool:
        """Return True if it has one token to compute, besides those that run again."""
        # Decode rows ask this several times a step, so no other property is called for them.
        left = len(self.token_ids) + self.num_pending - self.num_computed
        return left == 1 or left - self.num_replayed == 1

    @property
    def is_plain(self) -> bool:
        """Return True if its next row is the next token alone, and waits for nothing to arrive."""
        return not (self.replay_end or self.arrived) and self.held is None

    @property
    def is_prefilling(self) -> bool:
        """Return True if it has several tokens to compute, besides those that run again."""
        left = len(self.token_ids) + self.num_pending - self.num_computed
        return left > 1 and left - self.num_replayed > 1

    def may_run(self, max_model_len: int) -> bool:
        """Return True if the step in flight cannot end the sequence or change its next position.

        False too if its row needs to know the token that the step chooses.
        """
        if self.num_proposed:
            return False
        if not self.num_pending:
            return True
        # The pending token is the last one if it reaches a length, whichever token it is.
        length = len(self.token_ids) + self.num_pending
        is_ending = length >= max_model_len or length == self.length_limit
        return not is_ending and not self.group.awaits_tokens

    def row_in_flight(self) -> RowInFlight:
        """Return its state for a step that is scheduled now."""
        row = self._row_in_flight
        if row is None or row.table is not self.table or row.content is not self.content:
            row = RowInFlight(self.group, self.blocks, self.content)
            self._row_in_flight = row
        return row

    @property
    def num_schedulable(self) -> int:
        """Return the most tokens of one chunk: a leader stops where its followers fork."""
        if self.fork_at:
            return self.fork_at - self.num_computed
        return self.num_remaining - (1 if self.followers and self.num_remaining > 1 else 0)

    def settle(self, num_accepted: int) -> None:
        """Note that the pending token is known, and how many proposals were accepted before it."""
        self.num_pending -= 1
        self.num_proposed = 0
        # The sequence may have been preempted while the step was in flight.
        if self.slot is not None:
            self.num_computed += num_accepted

    def take_back(self, row: ScheduledSequence, num_accepted: int, *, keeps_states: bool) -> None:
        """Note that a row's state is beyond the proposals that were accepted.

        Args:
            row: the row, whose tokens are settled.
            num_accepted: how many of its proposals were accepted, less than all.
            keeps_states: True if the row kept the state before each proposal, False if it kept that
                before itself alone: then accepted tokens run again.
        """
        if self.slot is None or not row.kept_slots:
            return
        self.restored_from = row.kept_slots[num_accepted if keeps_states else 0]
        if not keeps_states:
            self.replay_end, self.num_computed = self.num_computed, row.start

    def add_token(self, token: SampledToken, max_model_len: int) -> FinishReason | None:
        """Append a token; return why it ended the sample, None if it did not."""
        token_id, group = token.token_id, self.group
        is_end = token_id in group.end_ids or token_id in self.request.params.stop_token_ids
        is_stop = is_end and not self.is_end_forced
        self.append_token(token_id)
        if is_stop:
            return FinishReason.STOP
        length = len(self.token_ids)
        if length >= max_model_len or length == self.length_limit:
            return FinishReason.LENGTH
        return None

    def append_token(self, token_id: int) -> None:
        """Append a token that has become known."""
        if not self.output_ids:
            # Until now the list was the prompt, which all samples of the request share.
            self.token_ids = self.token_ids.copy()
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)
        self.rules.take(token_id)

    def copy_tokens(self, other: Sequence) -> None:
        """Have the tokens of another sequence of the request."""
        self.token_ids, self.output_ids = other.token_ids.copy(), other.output_ids.copy()
        self.rules = other.rules.copy()

    def fork_from(self, parent: Sequence, table: BlockTable) -> None:
        """Go on with a fork of another running sequence's blocks, in a slot that it has."""
        self.table = table
        self.num_computed, self.num_kept = parent.num_computed, parent.num_kept
        self.num_drafted = min(parent.num_drafted, parent.num_computed)
        self.is_caught_up = parent.is_caught_up

    @property
    def is_end_forced(self) -> bool:
        """Return True if the next token is the last one there may be, and is forced."""
        return self.rules.forces_end(len(self.output_ids))

    def stop_reason(self, token: SampledToken | None, reason: FinishReason | None) -> int | None:
        """Return the caller's stop token that ended the sample; None for the model's own end."""
        if reason is not FinishReason.STOP or token is None or token.token_id in self.group.end_ids:
            return None
        return token.token_id
