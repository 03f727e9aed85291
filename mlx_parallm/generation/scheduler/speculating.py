"""Which sequences speculate in a step, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.step_plan import StepPlan
from mlx_parallm.generation.scheduler.updates import SpeculationStats
from mlx_parallm.generation.speculation import LONGEST_PAUSE, Speculation
from mlx_parallm.types.model_input import tokens_of
from mlx_parallm.types.step import ScheduledSequence

# BUDGET_SHARE: proposals take at most one in so many of the tokens that decode rows leave.
BUDGET_SHARE = 2
# DRAFT_TOKENS: most tokens of prompts and answers that a draft model computes in a step.
DRAFT_TOKENS = 2048
# A draft model that is further behind than this many tokens catches up before it proposes.
LARGEST_LAG = 2 * LONGEST_PAUSE
# Most tokens that a draft model computes for each token that the sequence may still get.
CATCH_UP_SHARE = 16
# DEFAULT_BATCH_SIZE: most sequences that decode for which proposals pay on a GPU, where a step of
# some hundred rows takes little longer than one of a few.
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, slots=True)
class KeptSlots:
    """The slots in which rows with proposals keep states of sequences.

    Attributes:
        first_slot: the first of them; each running sequence has as many as there may be proposals.
        has_each: True if rows keep the state before each proposal, False if they keep that before
            themselves alone.
    """

    first_slot: int
    has_each: bool


class Speculator:
    """Lets decoding sequences run proposals behind their last token, while few decode.

    Where sequences have a state, that is beyond the accepted proposals once some are refused. It is
    restored from what the row kept, and tokens that were accepted run again if they must. Proposals
    may run behind these, while the row has at most twice as many tokens as without them.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        kv: KVCacheManager,
        max_model_len: int,
        kept: KeptSlots | None = None,
    ) -> None:
        """Begin without proposals; ``kept`` is None if sequences have no state."""
        self._config = config
        self._kept = kept
        self._max_batch_size = config.disable_by_batch_size or DEFAULT_BATCH_SIZE
        self._kv = kv
        self._max_model_len = max_model_len
        self._num_drafts = 0
        self._num_proposed = 0
        self._accepted: Counter[int] = Counter()

    def await_tokens(self, decoding: list[Sequence], num_verifying: int, plan: StepPlan) -> bool:
        """Leave sequences out of a step if proposals will likely follow their pending token.

        Args:
            decoding: sequences that could run one token.
            num_verifying: number of sequences whose proposals the step in flight verifies.
            plan: gets the sequences that are left out, as ``awaited``.

        Returns:
            True if at least half of all sequences wait for the step in flight: then the others
            wait too, so that all of them run in the same steps.
        """
        num_decoding = len(decoding) + num_verifying
        if num_decoding > self._max_batch_size:
            return False
        plan.awaited = frozenset(
            sequence
            for sequence in decoding
            if sequence.num_pending
            and self._most(sequence) > 0
            and self._speculation(sequence).awaits(sequence.token_ids)
        )
        num_waiting = len(plan.awaited) + num_verifying
        return num_waiting > 0 and 2 * num_waiting >= num_decoding

    def propose(self, plan: StepPlan, others: int, count_spare: Callable[[], int]) -> None:
        """Add proposals to the decode rows of a plan; no sequence is preempted for them.

        Args:
            plan: has decode rows only.
            others: sequences that decode, but not in this step.
            count_spare: counts the free blocks that running prompts do not still need.
        """
        if len(plan.num_tokens) + others > self._max_batch_size:
            return
        room, spare = plan.budget_left // BUDGET_SHARE, count_spare()
        longest = 2 * (1 + self._config.num_speculative_tokens)
        for sequence, num_tokens in list(plan.num_tokens.items()):
            most = min(self._most(sequence), room, longest - num_tokens)
            if sequence.num_pending or most < 1 or num_tokens < sequence.num_remaining:
                continue
            proposals = self._speculation(sequence).propose(sequence.token_ids, most)
            fitting, num_blocks = self._fit(sequence, proposals, spare)
            if fitting:
                spare -= num_blocks
                room -= len(fitting)
                plan.add_proposals(sequence, fitting, self._kept_slots(sequence, len(fitting)))

    def plan_drafts(self, plan: StepPlan, num_running: int) -> None:
        """Plan what a draft model computes in a step: all that proposals need, and prompts."""
        if self._config.model is None:
            return
        for sequence in plan.proposals:
            plan.draft_ends[sequence] = len(sequence.token_ids)
        room = DRAFT_TOKENS if num_running <= self._max_batch_size else 0
        for sequence, num_tokens in plan.num_tokens.items():
            end = min(sequence.num_computed + num_tokens, len(sequence.token_ids))
            missing = end - sequence.num_drafted
            is_due = num_tokens > 1 or missing > LARGEST_LAG
            # Catching up pays only if the sequence may get many more tokens.
            is_due &= missing <= CATCH_UP_SHARE * self._num_left(sequence)
            taken = min(missing, room)
            if sequence in plan.proposals or not is_due or taken <= 0:
                continue
            if self._may_speculate(sequence):
                plan.draft_ends[sequence] = sequence.num_drafted + taken
                room -= taken

    def record(self, sequence: Sequence, row: ScheduledSequence, num_accepted: int) -> None:
        """Note how many of a row's proposals were accepted."""
        self._num_drafts += 1
        self._num_proposed += len(row.verify)
        self._accepted.update(range(num_accepted))
        if row.draft is not None and sequence.slot is not None:
            # The draft model ran all proposals but the last.
            sequence.num_drafted += min(num_accepted, len(row.verify) - 1)
        length = len(sequence.token_ids)
        self._speculation(sequence).record(length, len(row.verify), num_accepted)

    def _kept_slots(self, sequence: Sequence, num_proposals: int) -> tuple[int, ...]:
        """Return the slots in which a sequence's row with proposals keeps states."""
        if self._kept is None:
            return ()
        assert sequence.slot is not None
        first = self._kept.first_slot + sequence.slot * self._config.num_speculative_tokens
        return tuple(range(first, first + (num_proposals if self._kept.has_each else 1)))

    def replays(self, row: ScheduledSequence, num_accepted: int) -> bool:
        """Return True if a row's tokens run again, as far as they were accepted."""
        is_refused = len(row.verify) > max(num_accepted, 0)
        return self._kept is not None and not self._kept.has_each and is_refused

    def take_back(self, sequence: Sequence, row: ScheduledSequence, num_accepted: int) -> None:
        """Note where the state of a sequence is to be restored from, if it must be."""
        if self._kept is not None and num_accepted < len(row.verify):
            sequence.take_back(row, num_accepted, keeps_states=self._kept.has_each)

    def stats(self) -> SpeculationStats:
        """Return counts of what was proposed and accepted so far."""
        positions = range(self._config.num_speculative_tokens)
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_proposed,
            accepted_per_position=tuple(self._accepted[position] for position in positions),
        )

    def _most(self, sequence: Sequence) -> int:
        """Return how many proposals could count: one token follows the last of them."""
        if not self._may_speculate(sequence) or not sequence.output_ids:
            return 0
        missing = len(sequence.token_ids) - sequence.num_drafted
        if self._config.model is not None and missing > LARGEST_LAG:
            return 0
        left = self._num_left(sequence)
        return min(self._config.num_speculative_tokens, left - sequence.num_pending - 1)

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
        first = sequence.num_computed + sequence.num_remaining
        fitting = proposals[: (held + max(spare, 0)) * size - first]
        if not self._kv.grow(sequence.blocks, first + len(fitting)):
            return (), 0
        return fitting, len(sequence.blocks.blocks) - held

    def _may_speculate(self, sequence: Sequence) -> bool:
        """Return True if the request of a sequence allows speculation.

        A thinking budget, a grammar, timestamps and rules against repeated runs need to know the
        tokens before theirs, and beams compete for every token. Penalties count output tokens,
        which are not known yet while a draft model chooses them.
        """
        params = sequence.request.params
        if (
            not params.speculative
            or params.thinking_budget is not None
            or params.timestamps is not None
            or params.grammar is not None
            or sequence.group.awaits_tokens
        ):
            return False
        return self._config.model is None or not params.has_penalty

    def _speculation(self, sequence: Sequence) -> Speculation:
        if sequence.speculation is None:
            source = sequence.group.source
            tokens = () if source is None else tokens_of(source)
            sequence.speculation = Speculation(self._config, tokens)
        return sequence.speculation


def take_copies(running: Iterable[Sequence]) -> dict[Sequence, tuple[int, int]]:
    """Return the copies of states that take back refused proposals, for the next batch.

    They must be in it whether their sequences are or not: kept states do not last longer.
    """
    copies: dict[Sequence, tuple[int, int]] = {}
    for sequence in running:
        if sequence.restored_from is not None and sequence.slot is not None:
            copies[sequence] = sequence.restored_from, sequence.slot
            sequence.restored_from = None
    return copies
