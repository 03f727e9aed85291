"""The changes that a step made to one sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_parallm.generation.kv_cache.snapshots import NO_SNAPSHOTS, SnapshotStats
from mlx_parallm.types.events import FinishReason, PromptEvent
from mlx_parallm.types.record import message
from mlx_parallm.types.request import DEFAULT_VERSION
from mlx_parallm.types.step import SampledToken


@message
class SequenceUpdate:
    """One sample's share of a step's result.

    Attributes:
        request_id: the request.
        index: which of its ``n`` samples.
        token: the token chosen in this step, if any.
        earlier: tokens before it that come with it, as those of a beam do at the end.
        finish_reason: set when the sample ended.
        stop_reason: the stop token id that ended it; None for the model's own end-of-sequence.
        is_forced_end: True if ``token`` is an end token only because the sample reached its limit.
        prompt: set once per request, when its prompt has been computed.
        error: why the sample failed.
        version: label of the weights that chose the token.
    """

    request_id: str
    index: int
    token: SampledToken | None = None
    earlier: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    is_forced_end: bool = False
    prompt: PromptEvent | None = None
    error: str | None = None
    version: str = DEFAULT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counters of speculative decoding.

    Attributes:
        num_drafts: runs of proposals that were verified.
        num_draft_tokens: proposals among them.
        accepted_per_position: how often the first, second, ... proposal of a run was accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        """Return how many proposals were accepted."""
        return sum(self.accepted_per_position)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Load and counters of the scheduler.

    Attributes:
        num_running: sequences with a slot.
        num_waiting: sequences without one.
        num_waiting_tokens: tokens of the prompts that wait; samples of one prompt wait as one.
        kv_usage: share of the blocks that sequences hold, 0 to 1; cached ones count as free.
        num_free_blocks: blocks that no sequence holds.
        prefix_queries: prompt tokens looked up in the prefix cache so far.
        prefix_hits: how many of them were found.
        num_preemptions: how often a sequence was sent back to wait.
        speculation: what was proposed and accepted.
        images_computed: how often an image's features were computed so far.
        images_found: how often a sequence found them kept.
        sources_computed: how often a source was encoded so far.
        sources_found: how often a sequence found its KV.
        input_bytes: size of the features and other products of inputs that are kept.
        snapshots: of the states after prefixes.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0
    num_free_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    images_computed: int = 0
    images_found: int = 0
    sources_computed: int = 0
    sources_found: int = 0
    input_bytes: int = 0
    snapshots: SnapshotStats = NO_SNAPSHOTS
