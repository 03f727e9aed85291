"""Plain, picklable values that the scheduler and the runner exchange.

They hold no arrays and no live objects, so that rank 0 of a cluster could schedule, and every rank
run the same ``ScheduledBatch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from mlx_parallm.types.content import Buffer
from mlx_parallm.types.model_input import InputKind, InputRows, InputStages
from mlx_parallm.types.record import message
from mlx_parallm.types.request import DEFAULT_VERSION, SamplingParams

#: ``PIECE_BLOCKS``: most blocks that one op reads or writes.
PIECE_BLOCKS = 64
#: ``PIECE_STATES``: most states that one op reads or writes; one takes as much as many blocks.
PIECE_STATES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The moves of a step before it runs, in this order.

    Attributes:
        saved: pairs of a KV block and its content. What the block holds before all that follows
            comes back with the step's output.
        saved_states: pairs of a slot and the content of its state, which comes back likewise.
        filled: pairs of a KV block, each at most once, and the bytes that it shall hold.
        filled_states: pairs of a slot, each at most once, and the bytes of the state that it shall
            have.
        dropped: input slots whose product is not needed, computed or not.
        abandoned: numbers of runs of inputs that do not go on.
        stages: what is computed of inputs.
    """

    saved: tuple[tuple[int, bytes], ...] = ()
    saved_states: tuple[tuple[int, bytes], ...] = ()
    filled: tuple[tuple[int, Buffer], ...] = ()
    filled_states: tuple[tuple[int, Buffer], ...] = ()
    dropped: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    stages: tuple[InputStages, ...] = ()

    @property
    def take_time(self) -> bool:
        """True if the step takes longer than its rows do."""
        return bool(self.moves_rows or self.stages)

    @property
    def moves_rows(self) -> bool:
        """True if blocks or states are saved or filled."""
        return bool(self.saved or self.saved_states or self.filled or self.filled_states)

    @property
    def tokens(self) -> float:
        """The cost of all stages."""
        return sum(each.tokens for each in self.stages)

    @property
    def begun_tokens(self) -> int:
        """The cost of the inputs whose computation begins, all stages of it."""
        return sum(source.cost for each in self.stages for source in each.begun)

    def __bool__(self) -> bool:
        return bool(self.moves_rows or self.dropped or self.abandoned or self.stages)


NO_MOVES = Moves()


class Phase(StrEnum):
    """The engine thread's work, in the order of a step; ``STEP`` contains all other phases."""

    STEP = "step"
    SCHEDULE = "schedule"
    #: ``JOIN``: the thread waits until the graph of the step before is submitted.
    JOIN = "join"
    #: ``BUILD``: Python builds the graph.
    BUILD = "build"
    #: ``DISPATCH``: the graph is submitted, or given to the thread that submits it; the device may
    #: begin with it meanwhile.
    DISPATCH = "dispatch"
    #: ``EVALUATE``: dispatch and computation together, on devices without run-ahead.
    EVALUATE = "evaluate"
    #: ``WAIT``: the thread waits for a step's results and converts them to Python values.
    WAIT = "wait"
    #: ``UPDATE``: the scheduler applies the results.
    UPDATE = "update"
    #: ``DETOKENIZE``: tokens become text and events.
    DETOKENIZE = "detokenize"
    #: ``PUBLISH``: metrics are updated, and samples that met a stop string end.
    PUBLISH = "publish"


class StepTracer(Protocol):
    """Records the phases of the engine thread, which makes all the calls."""

    def span(
        self, phase: Phase, batch: ScheduledBatch | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that the thread enters for a phase of ``batch``; spans nest."""
        ...


class NoTracer:
    """Records nothing. Implements ``StepTracer``."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def span(
        self, phase: Phase, batch: ScheduledBatch | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        del phase, batch
        return self._nothing


@dataclass(frozen=True, slots=True)
class KVPlan:
    """A model's claim on the budget.

    Attributes:
        block_size: tokens per block.
        block_bytes: bytes of one block in all layers.
        wanted_blocks: blocks that ``max_num_seqs`` sequences of ``max_model_len`` could use, each
            with a source of the longest if the model has an encoder.
        max_model_len: longest sequence.
        state_bytes: what a sequence keeps besides blocks; 0 if nothing, or it cannot be copied.
        has_kv: False if blocks only count tokens.
        max_source_len: longest source, which each sequence of an encoder-decoder has.
    """

    block_size: int
    block_bytes: int
    wanted_blocks: int
    max_model_len: int
    state_bytes: int = 0
    has_kv: bool = True
    max_source_len: int = 0

    @property
    def wanted_bytes(self) -> int:
        """The claim in bytes."""
        return self.wanted_blocks * self.block_bytes

    @property
    def context_blocks(self) -> int:
        """Blocks of one sequence of ``max_model_len`` and its source."""
        lengths = (self.max_model_len, self.max_source_len)
        return sum(-(-tokens // self.block_size) for tokens in lengths)


# PENDING_TOKEN stands for a token that the step in flight, or a draft model, is still choosing; the
# runner reads it on the device.
PENDING_TOKEN = -1
#: ``PENDING_TOKENS``: the tokens of a row that has only such a one.
PENDING_TOKENS = (PENDING_TOKEN,)


@message
class SampleSpec:
    """The sampler's input to choose the token that follows a sequence's scheduled tokens.

    Attributes:
        params: the request's sampling parameters.
        seed: this sample's seed (already ``seed + i`` for sample i).
        position: index in the sequence of the token to be chosen. The random key is
            ``(seed, position)``, so a preempted sequence draws the same token again.
        prompt_ids: the prompt's tokens, without rows of inputs; read only for the repetition
            penalty.
        output_ids: tokens generated so far; read only for penalties and grammars. May be the
            scheduler's live list: the runner reads it during ``submit`` and keeps no reference.
        banned_ids: tokens that must not be chosen now (end tokens before ``min_tokens``).
        has_pending: True if the last token so far is pending, and so not yet in ``output_ids``.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned_ids: tuple[int, ...] = ()
    has_pending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInput:
    """Known tokens that a draft model computes before it makes proposals.

    ``start`` is the position of ``token_ids[0]``; all positions before it have been computed.
    """

    start: int
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        """The number of computed tokens after these."""
        return self.start + len(self.token_ids)


@message
class SourceTable:
    """The KV of a source, which every row of a sequence attends to.

    Attributes:
        block_table: ids of its KV blocks.
        num_tokens: its positions, at least one.
    """

    block_table: tuple[int, ...]
    num_tokens: int


@message
class ScheduledSequence:
    """One sequence's share of a step: a decode row (one token), one with proposals, or a chunk.

    Attributes:
        seq_id: unique in this engine for ever.
        slot: row of per-sequence runner state, in ``[0, max_num_seqs)``; unique among running
            sequences.
        start: position of ``token_ids[0]``; equals the number of tokens already computed. 0 means
            fresh state for models that keep a state per sequence.
        token_ids: the tokens to run, never empty; ``(PENDING_TOKEN,)`` where the step before
            chooses the token.
        block_table: ids of the KV blocks of positions ``0 .. start + len(token_ids) - 1``; more
            blocks may follow.
        adapter_slot: slot of the sequence's adapter; 0 is none.
        version: label of the weights that the step is computed with.
        sample: how to choose the token after the last of ``token_ids`` that is no proposal; None
            for a prefill chunk that does not end the prompt.
        verify: one entry per proposal at the end of ``token_ids``: how to choose the token that
            follows it. A choice counts only if all proposals before it were chosen too.
        kept_slots: empty, or one state slot per proposal, see ``RunnerInfo.keeps_states``. The i-th
            gets the state after the tokens before proposal i, so that a later ``state_copies``
            can undo proposals that are refused from there on. The sequence's own slot gets the
            state after all tokens.
        draft: tokens that the draft model runs, up to the last token that is no proposal; the draft
            model then makes the proposals that are ``PENDING_TOKEN``.
        prompt_logprobs: None, or how many likeliest tokens to report per target; -1 for all.
        target_ids: with ``prompt_logprobs``: the prompt tokens whose log-probabilities are wanted;
            they follow ``token_ids[target_start:]``, one each.
        target_start: index into ``token_ids`` of the token that ``target_ids[0]`` follows.
        prompt_entropy: True if the entropies at the targets are wanted too.
        values: True if the values at the targets and of the states that tokens are chosen in are
            wanted.
        inputs: rows that stand in place of the embeddings of some of ``token_ids``.
        rope_offsets: pairs of an index into ``token_ids`` and a number: from there on position ids,
            by which RoPE turns, are places plus that number. Empty: they are places.
        source: what the rows attend to besides their own sequence; None for a model without an
            encoder.
    """

    seq_id: int
    slot: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    adapter_slot: int = 0
    version: str = DEFAULT_VERSION
    sample: SampleSpec | None = None
    verify: tuple[SampleSpec, ...] = ()
    kept_slots: tuple[int, ...] = ()
    draft: DraftInput | None = None
    prompt_logprobs: int | None = None
    target_ids: tuple[int, ...] = ()
    target_start: int = 0
    prompt_entropy: bool = False
    values: bool = False
    inputs: tuple[InputRows, ...] = ()
    rope_offsets: tuple[tuple[int, int], ...] = ()
    source: SourceTable | None = None

    @property
    def proposals(self) -> tuple[int, ...]:
        """The proposals at the end of ``token_ids``, which the step verifies."""
        return self.token_ids[len(self.token_ids) - len(self.verify) :]

    def with_span(
        self,
        start: int,
        token_ids: tuple[int, ...],
        *,
        inputs: tuple[InputRows, ...] = (),
        rope_offsets: tuple[tuple[int, int], ...] = (),
    ) -> ScheduledSequence:
        """Return other tokens of the sequence, from position ``start``, to compute only.

        What belongs to the sequence stays. The fields named here belong to the tokens of a step:
        those that say how tokens are chosen or scored are empty.
        """
        return replace(
            self,
            start=start,
            token_ids=token_ids,
            sample=None,
            verify=(),
            kept_slots=(),
            draft=None,
            prompt_logprobs=None,
            target_ids=(),
            target_start=0,
            prompt_entropy=False,
            values=False,
            inputs=inputs,
            rope_offsets=rope_offsets,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """One step: rows of one token, then rows with proposals and prefill chunks.

    Before the forward the runner performs, in this order, ``block_copies`` ``(source, target)`` in
    every layer's pool and ``state_copies`` ``(source slot, target slot)`` of per-sequence state,
    one after the other. The first ``num_captures`` of these make snapshots, which own their memory.
    ``ended`` lists the constrained sequences that ended since the previous batch, so that their
    matchers can be dropped. ``adapters`` maps every ``adapter_slot`` to its adapter's digest.
    ``moves`` are made first of all. A batch without sequences has nothing else.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()
    num_captures: int = 0
    ended: tuple[int, ...] = ()
    adapters: Mapping[int, str] = field(default_factory=dict[int, str])
    moves: Moves = NO_MOVES

    @property
    def num_tokens(self) -> int:
        """Tokens run in this step."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and the likeliest alternatives, best first.

    Every number is finite: masked tokens are not in ``top``, and a token of probability 0 has the
    least float32. If the request lists token ids, ``top`` has these instead. ``rank`` is 1 plus
    the number of likelier tokens; only prompt tokens have it. ``entropy`` is the entropy of the
    distribution in nats; None unless requested. ``value`` is the value head's number for the state
    before the token; None unless requested.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    entropy: float | None = None
    value: float | None = None


@message
class SampledToken:
    """The token chosen for a sequence; ``logprob`` is None unless requested."""

    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The results of one step.

    Attributes:
        tokens: one entry per scheduled sequence with a ``sample``, in batch order, except those in
            ``failed``; one more entry for each accepted proposal.
        prompt_logprobs: by ``seq_id``, one entry per ``target_ids`` of that sequence.
        failed: by ``seq_id``, why this sequence (and only it) could not be run.
        saved: the contents of the batch's ``Moves.saved``, then of ``Moves.saved_states``, each
            with the bytes that its block or its slot held.
        bad_slots: those of the batch's snapshots that have a NaN.
    """

    tokens: tuple[SampledToken, ...]
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprob, ...]]
    )
    failed: Mapping[int, str] = field(default_factory=dict[int, str])
    saved: tuple[tuple[bytes, Buffer], ...] = ()
    bad_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """Facts about a loaded model that the rest of the engine needs.

    Attributes:
        path: how the forward runs: "packed", "split", "sequential" or "alone"; see docs/models.md.
        vocab_size: rows of the table of word embeddings; the API refuses greater ids.
        max_model_len: longest sequence, prompt and output together, in tokens.
        num_blocks: KV blocks in the pool.
        block_size: tokens per block.
        kv_bytes: size of the pool, in bytes.
        weight_bytes: size of the weights, in bytes.
        has_state: True if the model keeps a state per sequence besides KV (recurrent, convolution);
            blocks do not hold that state, so reuse of a prefix needs a snapshot of it.
        state_bytes: size of a sequence's state; 0 if there is none, or it cannot be copied.
        keeps_states: True if a step can give the state after each token of a row with proposals,
            see ``ScheduledSequence.kept_slots``.
        attention_backend: name of the attention backend in use.
        dtype: the dtype the model computes in.
        kv_cache_dtype: how KV is kept, as in ``CacheConfig``.
        runs_ahead: True if a step may be submitted before the previous one has ended.
        is_compiled: True if steps of decode rows call a compiled function.
        input_width: numbers per row of an input besides tokens; 0 if the model takes none.
        input_kinds: the kinds of inputs that the model takes besides tokens.
        num_tower_stages: the stages in which the features of an image, or the KV of a source, are
            computed.
        max_source_len: longest source, in positions; 0 if the model has no encoder.
        source_vocab_size: rows of the table of word embeddings for sources; 0 if it is the same.
        has_value_head: True if the model's own weights have a value head.
    """

    path: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes: int
    weight_bytes: int
    has_state: bool
    attention_backend: str
    dtype: str
    kv_cache_dtype: str = "auto"
    runs_ahead: bool = False
    is_compiled: bool = False
    input_width: int = 0
    input_kinds: tuple[InputKind, ...] = ()
    num_tower_stages: int = 1
    state_bytes: int = 0
    keeps_states: bool = False
    max_source_len: int = 0
    source_vocab_size: int = 0
    has_value_head: bool = False


class StepInFlight(Protocol):
    """A step that was submitted."""

    def wait(self) -> StepOutput:
        """Return the step's results; raise only if no sequence of the batch could be run.

        If it raises, the results of a step that was submitted behind it mean nothing.
        """
        ...


class Runner(Protocol):
    """Runs steps of one model. The only part of the engine that holds arrays."""

    info: RunnerInfo
    """Facts about the loaded model."""

    submits_beside: bool = False
    """True if the caller of ``submit`` waits for steps before the new one, and never for it."""

    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        """Begin a step; raise only if no sequence of the batch could be run.

        Steps end in the order of submission. Unless ``info.runs_ahead``, the caller must have
        waited for the previous step.
        """
        ...

    def release(self) -> None:
        """Free the memory of the model, which runs no more; no step may be in flight.

        By default its arrays are freed with this object.
        """
