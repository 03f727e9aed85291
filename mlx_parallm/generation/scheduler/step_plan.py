"""The plan of a step while it is made."""

from __future__ import annotations

import math

from mlx_parallm.generation.inputs.runs import StageAllowance
from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.step_cost import PrefillAllowance, StepWork
from mlx_parallm.types.content import Buffer


class StepPlan:
    """Sequences and how many tokens each runs, in order, within a token budget.

    Attributes:
        budget_left: tokens that may still be added.
        allowance: bounds the time of prefill too; None if no decode row waits for it.
        has_streams: whether decode rows are planned, or in flight.
        is_shared: whether streams of other models wait for the step.
        stages: bounds what is computed of inputs; None before any is.
        has_new_products: whether products of inputs became ready in this plan.
        num_tokens: of each sequence, proposals not counted.
        proposals: guesses that are run after them.
        kept_slots: the slots in which rows with proposals keep states.
        draft_ends: how many tokens a draft model is to have computed of each.
        awaited: sequences left out until their pending token is known.
        has_preempted: whether a sequence lost its blocks to a better one.
        block_copies: ``(source, target)`` blocks to copy for forked sequences before the step.
        state_copies: ``(source, target)`` slots whose state to copy for them.
        filled: blocks to be filled before the step, and their bytes.
        filled_states: slots to be given a state before the step, and its bytes.
        filling: the sequences that they are for.
    """

    def __init__(self, token_budget: int, *, is_shared: bool = False) -> None:
        self.budget_left = token_budget
        self.is_shared = is_shared
        self.allowance: PrefillAllowance | None = None
        self.has_streams = False
        self.stages: StageAllowance | None = None
        self.has_new_products = False
        self.num_tokens: dict[Sequence, int] = {}
        self.proposals: dict[Sequence, tuple[int, ...]] = {}
        self.kept_slots: dict[Sequence, tuple[int, ...]] = {}
        self.draft_ends: dict[Sequence, int] = {}
        self.awaited: frozenset[Sequence] = frozenset()
        self.has_preempted = False
        self.block_copies: dict[Sequence, tuple[int, int]] = {}
        self.state_copies: dict[Sequence, tuple[int, int]] = {}
        self.filled: dict[int, Buffer] = {}
        self.filled_states: dict[int, Buffer] = {}
        self.filling: set[Sequence] = set()

    @property
    def is_decode(self) -> bool:
        """Return True if only decode rows are planned so far."""
        return all(sequence.is_decoding for sequence in self.num_tokens)

    @property
    def work(self) -> StepWork:
        """Return the work of the rows so far."""
        return StepWork.of(
            (sequence.num_computed, count + len(self.proposals.get(sequence, ())))
            for sequence, count in self.num_tokens.items()
        )

    def room(self, start: int = 0) -> int:
        """Return how many prompt tokens from position ``start`` on may still be added."""
        if self.allowance is None:
            return self.budget_left
        return min(self.budget_left, self.allowance.room(start))

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Run a sequence's next tokens, or that many more of them, in this step."""
        planned = self.num_tokens.get(sequence, 0)
        if self.allowance is not None:
            self.allowance.take(sequence.num_computed + planned, num_tokens)
        self.num_tokens[sequence] = planned + num_tokens
        self.budget_left -= num_tokens

    def spend(self, num_tokens: float) -> None:
        """Take the cost of computing inputs from the budget.

        A step that would run nothing else keeps one token: its rows follow in the same step.
        """
        least = 0 if self.num_tokens else 1
        self.budget_left = max(self.budget_left - math.ceil(num_tokens), least)

    def add_proposals(
        self, sequence: Sequence, proposals: tuple[int, ...], kept_slots: tuple[int, ...] = ()
    ) -> None:
        """Run proposals after the last token of a sequence, and keep states in these slots."""
        self.proposals[sequence] = proposals
        self.kept_slots[sequence] = kept_slots
        self.budget_left -= len(proposals)

    def drop(self, sequence: Sequence) -> None:
        """Take a preempted sequence out of the plan.

        Copies from its blocks stay, and so do bytes that fill them or its slot: all that happens
        before the next owner writes to them.
        """
        self.filling.discard(sequence)
        self.has_preempted = True
        self.budget_left += self.num_tokens.pop(sequence, 0)
        self.budget_left += len(self.proposals.pop(sequence, ()))
        self.kept_slots.pop(sequence, None)
        self.block_copies.pop(sequence, None)
        self.state_copies.pop(sequence, None)
