"""What passes between the scheduler and the runner: plain, picklable Python values.

Rank 0 of a cluster could schedule and every rank run the same ``ScheduledBatch``; that is why no
array and no live object is in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlx_parallm.types.record import message
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.weights import DEFAULT_VERSION

# Stands for a token that the step in flight, or a draft model, is still choosing: the runner has it
# on the device.
PENDING_TOKEN = -1


@message
class SampleSpec:
    """What the sampler needs to choose the token that follows a sequence's scheduled tokens.

    Attributes:
        params: the request's sampling parameters.
        seed: this sample's seed (already ``seed + i`` for sample i).
        position: index in the sequence of the token to be chosen. The random key is
            ``(seed, position)``, so a preempted sequence draws the same token again.
        prompt_ids: the prompt; read only for the repetition penalty.
        output_ids: tokens generated so far; read only for penalties and grammars. May be the
            scheduler's live list: the runner reads it during ``submit`` and keeps no reference.
        banned_ids: tokens that must not be chosen now (end tokens before ``min_tokens``).
        has_pending: whether the last token so far is pending, and so not in ``output_ids``.
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
    """Known tokens that a draft model computes before it proposes anything.

    ``start`` is the position of ``token_ids[0]``: what comes before it has been computed.
    """

    start: int
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        """Tokens computed with these."""
        return self.start + len(self.token_ids)


@message
class ScheduledSequence:
    """One sequence's share of a step: a decode row (one token), one with proposals, or a chunk.

    Attributes:
        seq_id: unique in this engine for ever.
        slot: row of per-sequence runner state, in ``[0, max_num_seqs)``; unique among the running.
        start: position of ``token_ids[0]``; equals the number of tokens already computed. 0 means
            fresh state for models that keep a state per sequence.
        token_ids: the tokens to run, never empty; ``(PENDING_TOKEN,)`` where the step before
            chooses the token.
        block_table: ids of the KV blocks of positions ``0 .. start + len(token_ids) - 1``, and
            perhaps of later ones.
        adapter_slot: which resident adapter the sequence has; 0 is none.
        version: label of the weights that the step is computed with.
        sample: set when a token follows the last of ``token_ids`` that is no proposal; None for an
            inner prefill chunk.
        verify: set when the last of ``token_ids`` are proposals: what chooses the token that
            follows each. A choice counts while the proposals before it were chosen too.
        draft: what the draft model runs. Proposals that are ``PENDING_TOKEN`` are its to make, and
            these tokens then end with the last one that is no proposal.
        prompt_logprobs: None, or how many likeliest tokens to report per target; -1 for all.
        target_ids: with ``prompt_logprobs``: the prompt tokens that follow ``token_ids`` from
            ``target_start`` on, whose log-probabilities are wanted (the last of a prompt is
            followed by none).
        target_start: index into ``token_ids`` of the token that ``target_ids[0]`` follows.
        prompt_entropy: whether the entropies at the targets are wanted too.
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
    draft: DraftInput | None = None
    prompt_logprobs: int | None = None
    target_ids: tuple[int, ...] = ()
    target_start: int = 0
    prompt_entropy: bool = False

    @property
    def proposals(self) -> tuple[int, ...]:
        """The last of ``token_ids``, which are guesses to be verified."""
        return self.token_ids[len(self.token_ids) - len(self.verify) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """One step: rows of one token first, then rows with proposals and prefill chunks.

    Before the forward the runner performs, in this order, ``block_copies`` ``(source, target)`` in
    every layer's pool and ``state_copies`` ``(source slot, target slot)`` of per-sequence state.
    ``ended`` are constrained sequences that ended since the batch before: no later one has them.
    ``adapters`` is the content (a digest) of every ``adapter_slot`` that the sequences have.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()
    ended: tuple[int, ...] = ()
    adapters: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens run in this step."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and the likeliest alternatives, best first.

    Every number is finite: what cannot be sampled is not in ``top``, and a token that the model
    holds impossible has the least float32. ``top`` has the tokens that were asked for by id
    instead, where there are such. ``rank`` is 1 plus the number of tokens that are likelier; only
    prompt tokens have it. ``entropy``, in nats, is that of the distribution, where asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    entropy: float | None = None


@message
class SampledToken:
    """The token chosen for one sequence; ``logprob`` is set when it was asked for."""

    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step produced.

    Attributes:
        tokens: one entry per scheduled sequence that has a ``sample``, in batch order, but for
            those in ``failed``; of one with proposals, another entry for each that was accepted.
        prompt_logprobs: by ``seq_id``, one entry per ``target_ids`` of that sequence.
        failed: by ``seq_id``, why this sequence (and only it) could not be run.
    """

    tokens: tuple[SampledToken, ...]
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What the rest of the engine must know about a loaded model.

    Attributes:
        path: how the forward runs: "packed", "split", "sequential" or "alone"; see docs/models.md.
        vocab_size: rows of the embedding table: ids from it on are refused at the door.
        max_model_len: longest sequence, prompt and output together, in tokens.
        num_blocks: KV blocks in the pool.
        block_size: tokens per block.
        kv_bytes: size of the pool, in bytes.
        weight_bytes: size of the weights, in bytes.
        has_state: whether the model keeps a state per sequence besides KV (recurrent, convolution);
            such state is not in the blocks, so their prefixes cannot be reused.
        attention_backend: name of the attention backend in use.
        dtype: the dtype the model computes in.
        kv_cache_dtype: how KV is kept, as in ``CacheConfig``.
        runs_ahead: whether a step may be submitted before the one before it has ended.
        is_compiled: whether steps of decode rows are calls of a compiled function.
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


class StepInFlight(Protocol):
    """A step that was submitted."""

    def wait(self) -> StepOutput:
        """What it produced; raises only when no sequence of the batch could be run."""
        ...


class Runner(Protocol):
    """Runs steps of one model. The only part of the engine that holds arrays."""

    @property
    def info(self) -> RunnerInfo:
        """Facts about the loaded model."""
        ...

    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        """Begin a step; raise only when no sequence of the batch could be run.

        Steps end in the order in which they are submitted. Unless ``info.runs_ahead``, the one
        before must have been waited for.
        """
        ...
