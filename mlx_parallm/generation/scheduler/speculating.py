"""Which sequences speculate in a step, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.step_plan import StepPlan
from mlx_parallm.generation.scheduler.updates import SpeculationStats
from mlx_parallm.generation.speculation.pace import LONGEST_PAUSE
from mlx_parallm.generation.speculation.proposer import Speculation
from mlx_parallm.types.step import DraftInput, ScheduledSequence

# Proposals take at most this share of the token budget that decode rows leave.
BUDGET_SHARE = 2
# Most tokens of prompts and answers that a draft model computes in a step.
DRAFT_TOKENS = 2048
# A draft model that is further behind than this many tokens catches up before it proposes.
LARGEST_LAG = 2 * LONGEST_PAUSE
# Most tokens that a draft model computes for each token that the sequence may still get.
CATCH_UP_SHARE = 16
DEFAULT_BATCH_SIZE = 32


class Speculator:
    """Lets decoding sequences run proposals behind their last token, while few decode."""

    def __init__(
        self, config: SpeculativeConfig | None, kv: KVCacheManager, max_model_len: int
    ) -> None:
        self._config = config
        self._kv = kv
        self._max_model_len = max_model_len
        self._num_drafts = 0
        self._num_proposed = 0
        self._accepted: Counter[int] = Counter()

    def count_verifying(self, running: Iterable[Sequence]) -> int:
        """Return how many sequences have proposals that the step in flight verifies."""
        return 0 if self._config is None else sum(sequence.num_proposed > 0 for sequence in running)

    def await_tokens(self, decoding: list[Sequence], running: int, plan: StepPlan) -> bool:
        """Leave sequences out of a step whose pending token likely begins a match.

        Args:
            decoding: sequences that could run one token.
            running: those whose proposals are being verified.
            plan: is told which to leave out.

        Returns:
            Whether the whole step should wait instead, as most sequences do: they all stay in step.
        """
        if self._config is None or not self._is_small(len(decoding) + running):
            return False
        plan.awaited = frozenset(
            sequence
            for sequence in decoding
            if sequence.num_pending and self._awaits(sequence, self._config)
        )
        waiting = len(plan.awaited) + running
        return waiting > 0 and 2 * waiting >= len(decoding) + running

    def propose(self, plan: StepPlan, others: int, count_spare: Callable[[], int]) -> None:
        """Add proposals to the decode rows of a plan, for which nobody is preempted.

        Args:
            plan: has decode rows only.
            others: sequences that decode, but not in this step.
            count_spare: counts the free blocks that nobody was promised.
        """
        config = self._config
        if config is None or not self._is_small(len(plan.num_tokens) + others):
            return
        room, spare = plan.budget_left // BUDGET_SHARE, count_spare()
        for sequence in list(plan.num_tokens):
            most = min(self._most(sequence, config), room)
            if sequence.num_pending or most < 1:
                continue
            proposals = _state(sequence, config).propose(sequence.token_ids, most)
            fitting, num_blocks = self._fit(sequence, proposals, spare)
            if fitting:
                spare -= num_blocks
                room -= len(fitting)
                plan.add_proposals(sequence, fitting)

    def plan_drafts(self, plan: StepPlan, num_running: int) -> None:
        """Plan what a draft model computes in a step: all that proposals need, and prompts."""
        config = self._config
        if config is None or config.model is None:
            return
        for sequence in plan.proposals:
            plan.draft_ends[sequence] = len(sequence.token_ids)
        room = DRAFT_TOKENS if self._is_small(num_running) else 0
        for sequence, num_tokens in plan.num_tokens.items():
            end = min(sequence.num_computed + num_tokens, len(sequence.token_ids))
            missing = end - sequence.num_drafted
            is_due = num_tokens > 1 or missing > LARGEST_LAG
            # Catching up pays only if the sequence may get many more tokens.
            is_due &= missing <= CATCH_UP_SHARE * self._num_left(sequence)
            taken = min(missing, room)
            if sequence in plan.proposals or not is_due or taken <= 0:
                continue
            if _may_speculate(sequence, config):
                plan.draft_ends[sequence] = sequence.num_drafted + taken
                room -= taken

    def note_drafted(self, sequence: Sequence, draft: DraftInput) -> None:
        """Note that a step computed the draft model's KV of tokens; proposals do not count."""
        self._kv.mark_drafted(sequence.blocks, draft.end)

    def record(self, sequence: Sequence, row: ScheduledSequence, num_accepted: int) -> None:
        """Note how many of a row's proposals were accepted."""
        assert self._config is not None, "nothing is proposed without"
        self._num_drafts += 1
        self._num_proposed += len(row.verify)
        self._accepted.update(range(num_accepted))
        if row.draft is not None and sequence.slot is not None:
            # The draft model ran all proposals but the last.
            sequence.num_drafted += min(num_accepted, len(row.verify) - 1)
        state = _state(sequence, self._config)
        state.record(len(sequence.token_ids), len(row.verify), num_accepted)

    def stats(self) -> SpeculationStats:
        """Return counts of what was proposed and accepted so far."""
        if self._config is None:
            return SpeculationStats()
        positions = range(self._config.num_speculative_tokens)
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_proposed,
            accepted_per_position=tuple(self._accepted[position] for position in positions),
        )

    def _is_small(self, num_decoding: int) -> bool:
        assert self._config is not None
        return num_decoding <= (self._config.disable_by_batch_size or DEFAULT_BATCH_SIZE)

    def _awaits(self, sequence: Sequence, config: SpeculativeConfig) -> bool:
        if self._most(sequence, config) < 1:
            return False
        return _state(sequence, config).awaits(sequence.token_ids)

    def _most(self, sequence: Sequence, config: SpeculativeConfig) -> int:
        """Return how many proposals could count: one token follows the last of them."""
        if not _may_speculate(sequence, config) or not sequence.output_ids:
            return 0
        missing = len(sequence.token_ids) - sequence.num_drafted
        if config.model is not None and missing > LARGEST_LAG:
            return 0
        left = self._num_left(sequence)
        return min(config.num_speculative_tokens, left - sequence.num_pending - 1)

    def _num_left(self, sequence: Sequence) -> int:
        """Return how many tokens the sequence may still get."""
        left = self._max_model_len - len(sequence.token_ids)
        max_tokens = sequence.request.params.max_tokens
        return left if max_tokens is None else min(left, max_tokens - len(sequence.output_ids))

    def _fit(
        self, sequence: Sequence, proposals: tuple[int, ...], spare: int
    ) -> tuple[tuple[int, ...], int]:
        """Return the proposals that have room, after taking blocks for them."""
        size, held = self._kv.block_size, len(sequence.blocks.blocks)
        first = sequence.num_computed + 1
        fitting = proposals[: (held + max(spare, 0)) * size - first]
        if not self._kv.grow(sequence.blocks, first + len(fitting)):
            return (), 0
        return fitting, len(sequence.blocks.blocks) - held


def _may_speculate(sequence: Sequence, config: SpeculativeConfig) -> bool:
    """Return True if the request of a sequence allows speculation.

    Penalties count tokens that a draft model is to choose; a budget counts known tokens, and a
    grammar follows them.
    """
    params = sequence.request.params
    if not params.speculative or params.thinking_budget is not None or params.grammar is not None:
        return False
    return config.model is None or not params.has_penalty


def _state(sequence: Sequence, config: SpeculativeConfig) -> Speculation:
    if sequence.speculation is None:
        sequence.speculation = Speculation(config)
    return sequence.speculation
