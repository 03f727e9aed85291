"""Makes the rows of a batch from the plan of a step."""

from __future__ import annotations

from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.step_plan import StepPlan
from mlx_parallm.types.step import PENDING_TOKENS, DraftInput, SampleSpec, ScheduledSequence


def planned_rows(plan: StepPlan) -> list[tuple[Sequence, int]]:
    """Return the sequences of a plan and their numbers of tokens, in the order of a batch.

    Rows of one token come first, and each part is best first.
    """
    rows = list(plan.num_tokens.items())
    if plan.proposals or any(count > 1 for count in plan.num_tokens.values()):
        # The sort is stable.
        rows.sort(key=lambda row: row[1] > 1 or row[0] in plan.proposals)
    return rows


def schedule_row(sequence: Sequence, num_tokens: int, plan: StepPlan) -> ScheduledSequence:
    """Return a step's row for a sequence's next ``num_tokens`` tokens.

    They then count as computed. Proposals run behind them, and count once they are accepted.
    """
    assert sequence.slot is not None, "only a running sequence can be scheduled"
    start = sequence.num_computed
    if start == len(sequence.token_ids) and sequence.held is None:
        return _pending_row(sequence, sequence.slot, plan.draft_ends.get(sequence))
    proposals, draft_end = plan.proposals.get(sequence, ()), plan.draft_ends.get(sequence)
    end = start + num_tokens
    is_last = num_tokens == sequence.num_remaining
    request, held, inputs = sequence.request, sequence.held, sequence.group.inputs
    params, targets = request.params, _targets(sequence, start, end)
    # A request for no tokens only scores its prompt.
    samples = is_last and params.max_tokens != 0
    row = ScheduledSequence(
        seq_id=sequence.seq_id,
        slot=sequence.slot,
        start=start,
        token_ids=(tuple(sequence.token_ids[start:end]) or PENDING_TOKENS) + proposals,
        block_table=sequence.blocks.as_tuple(),
        adapter_slot=sequence.adapter_slot,
        version=sequence.group.weights.label,
        sample=sample_spec(sequence, end) if samples else None,
        verify=tuple(sample_spec(sequence, end, proposals[: i + 1]) for i in range(len(proposals))),
        kept_slots=plan.kept_slots.get(sequence, ()),
        draft=None if draft_end is None else _draft_input(sequence, draft_end),
        prompt_logprobs=params.prompt_logprobs,
        target_ids=request.prompt_ids[targets.start : targets.stop],
        target_start=targets.start - start - 1 if targets else 0,
        prompt_entropy=params.entropy,
        values=params.values,
        inputs=() if held is None else held.rows(start, end),
        rope_offsets=() if held is None else inputs.rope_offsets(start, end),
        source=None if held is None else held.source,
    )
    if held is not None:
        held.pass_rows(end)
    sequence.num_computed = end
    sequence.num_pending += samples
    sequence.is_caught_up |= is_last
    sequence.num_proposed = len(proposals)
    return row


def _pending_row(sequence: Sequence, slot: int, draft_end: int | None) -> ScheduledSequence:
    """Return the row of the token that the step in flight chooses, which has no proposals.

    Most rows are such. Naming every field would take a third longer.
    """
    start, params = sequence.num_computed, sequence.request.params
    row = ScheduledSequence(
        seq_id=sequence.seq_id,
        slot=slot,
        start=start,
        token_ids=PENDING_TOKENS,
        block_table=sequence.blocks.as_tuple(),
        adapter_slot=sequence.adapter_slot,
        version=sequence.group.weights.label,
        sample=sample_spec(sequence, start + 1),
        draft=None if draft_end is None else _draft_input(sequence, draft_end),
        prompt_logprobs=params.prompt_logprobs,
        prompt_entropy=params.entropy,
        values=params.values,
    )
    sequence.num_computed = start + 1
    sequence.num_pending += 1
    sequence.is_caught_up = True
    sequence.num_proposed = 0
    return row


def _draft_input(sequence: Sequence, end: int) -> DraftInput:
    """Return what a draft model computes to have computed the first ``end`` tokens."""
    start, sequence.num_drafted = sequence.num_drafted, end
    return DraftInput(start=start, token_ids=tuple(sequence.token_ids[start:end]))


def sample_spec(sequence: Sequence, end: int, proposals: tuple[int, ...] = ()) -> SampleSpec:
    """Return the sampler's input for the token after the first ``end`` tokens and proposals."""
    output_ids, has_pending = sequence.output_ids, sequence.num_pending > 0
    num_before = len(output_ids) + sequence.num_pending + len(proposals)
    params, banned = sequence.rules.next(num_before, has_pending=has_pending)
    if proposals and params.has_penalty:
        output_ids = [*output_ids, *proposals]
    return SampleSpec(
        params=params,
        seed=sequence.seed,
        position=end + len(proposals),
        prompt_ids=sequence.group.known_ids,
        output_ids=output_ids,
        banned_ids=banned,
        has_pending=has_pending,
    )


def _targets(sequence: Sequence, start: int, end: int) -> range:
    """Return the positions of scored prompt tokens that follow those at ``start`` to ``end``.

    Until all are known a single sample, the leader, computes the prompt. After a preemption it is
    computed again, but not reported again.
    """
    if sequence.request.params.prompt_logprobs is None:
        return range(0)
    first = max(start + 1, len(sequence.group.prompt_logprobs))
    return range(first, min(end + 1, len(sequence.request.prompt_ids)))
