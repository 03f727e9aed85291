"""The times of steps that have ended, and the bounds of the next one."""

from __future__ import annotations

import math

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.engine.turns import TARGET_SHARE
from mlx_parallm.generation.inputs.runs import StageAllowance
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.generation.scheduler.step_cost import (
    MIN_CHUNK,
    PrefillAllowance,
    StageCost,
    StepCost,
    StepWork,
)
from mlx_parallm.generation.scheduler.step_plan import StepPlan
from mlx_parallm.types.step import ScheduledBatch

# STAGES_SHARE: computing inputs gets this share of the token budget, or of the time that decode
# rows can wait for, while prompts can be prefilled too.
STAGES_SHARE = 0.5
# LEAST_BUDGET: a bound that is only a default leaves steps this share of the token budget, so that
# it costs little throughput however slow a device is.
LEAST_BUDGET = 0.75
# OBSERVED: without a bound one in so many steps that only decode is observed.
OBSERVED = 8
DEFAULT_TOKEN_BUDGET = 1024


class StepTimes:
    """Learns what steps take, and bounds prefill and stages of inputs beside decode rows.

    Attributes:
        token_budget: most tokens of a step.
        bound_s: seconds that a step with decode rows may take; 0 if only tokens bound it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tiers: Tiers | None,
        *,
        has_tower: bool = False,
        pads: bool = False,
        default_stall_ms: float | None = None,
    ) -> None:
        """Begin without measurements.

        Args:
            config: has the token budget and the bound.
            tiers: learn what computing tokens takes; None if there are none.
            has_tower: True if computing inputs takes several stages.
            pads: see ``Scheduler``.
            default_stall_ms: see ``Scheduler``.
        """
        # Every decode row must fit: a step without room for all of them would starve some.
        self.token_budget = max(
            config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET, config.max_num_seqs
        )
        given_ms = config.max_decode_stall_ms
        bound_ms = default_stall_ms if given_ms is None else given_ms
        self.bound_s = TARGET_SHARE * (bound_ms or 0.0) / 1e3
        # Stages of inputs are bounded by what prefill takes unless a bound was given.
        self._stages_bound_s = self.bound_s if given_ms else 0.0
        self._least_tokens = 0 if given_ms else int(LEAST_BUDGET * self.token_budget)
        self._cost = StepCost(pads=pads) if has_tower or self.bound_s else None
        self._stage_cost = StageCost()
        self._tiers = tiers
        self._num_unobserved = 0

    def observe(self, batch: ScheduledBatch, seconds: float, *, is_end_known: bool = True) -> None:
        """Learn from a step that took ``seconds``; see ``StepCost.observe``."""
        tiers, moves = self._tiers, batch.moves
        if moves.moves_rows:
            self.skip()
            return
        # Rows of one token come first, and most steps have no others.
        rows = batch.sequences
        has_prompts = bool(rows) and len(rows[-1].token_ids) > 1
        if self._cost is None and (tiers is None or not has_prompts):
            return
        work = StepWork.of((row.start, len(row.token_ids)) for row in rows)
        if tiers is not None and work.prefill_tokens >= MIN_CHUNK and not moves.stages:
            tiers.fetches.computing.observe(work.prefill_tokens, seconds)
        if self._cost is None:
            return
        if moves.tokens:
            rows_s = self._cost.predict(work)
            self._stage_cost.observe(moves.tokens, moves.begun_tokens, seconds, rows_s)
            if tiers is not None and seconds > rows_s:
                tiers.fetches.encoding.observe(moves.tokens, seconds - rows_s)
            self.skip()
            return
        self._observe_rows(self._cost, work, seconds, is_end_known=is_end_known)

    def _observe_rows(
        self, cost: StepCost, work: StepWork, seconds: float, *, is_end_known: bool
    ) -> None:
        self._num_unobserved += 1
        is_due = self.bound_s or work.prefill_tokens or self._num_unobserved >= OBSERVED
        if is_due or cost.joins(work):
            self._num_unobserved = 0
            cost.observe(work, seconds, is_end_known=is_end_known)
        else:
            cost.end_run()

    def skip(self) -> None:
        """Note a step that nothing can be learned from, or that failed."""
        if self._cost is not None:
            self._cost.skip()

    def prefill(self, plan: StepPlan) -> PrefillAllowance:
        """Return how much prefill the decode rows planned so far can wait for."""
        assert self._cost is not None, "a time is bounded"
        stages_s = 0.0
        if plan.stages is not None:
            stages_s = self._stage_cost.predict(plan.stages.taken, plan.stages.begun)
        seconds = self.bound_s - stages_s
        return PrefillAllowance(self._cost, plan.work, seconds, self._least_tokens)

    def stages(
        self, plan: StepPlan, cost: int, *, begins: bool, has_prompts: bool
    ) -> StageAllowance:
        """Return how much of inputs the step computes.

        Without decode rows that is the budget, or a share of it beside prompts. Decode rows wait as
        long as the bound allows or, without one, as long as for the prefill of as many tokens, up
        to a share of the budget. Where prompts are never long, the rows may also wait as long as
        they take themselves, which at most doubles the time between their tokens, unless other
        models' streams wait too.

        Args:
            plan: the rows so far.
            cost: that of the next run of inputs, in tokens.
            begins: True if that run has not begun.
            has_prompts: True if there are prompts that could be prefilled now.
        """
        share = STAGES_SHARE if has_prompts else 1.0
        if not plan.has_streams or self._cost is None:
            most = share * self.token_budget
            return StageAllowance(min(most, plan.budget_left), most, is_whole=True)
        number = min(cost, self.token_budget)
        known_s = self._cost.prefill_s + self._cost.chunk_s(0, number)
        rows_s, bound_s = self._cost.predict(plan.work), self._stages_bound_s
        seconds = share * (bound_s - rows_s) if bound_s else known_s or math.inf
        begun = cost if begins else 0
        most = min(self._stage_cost.tokens_within(seconds, begun), STAGES_SHARE * self.token_budget)
        if not (bound_s or known_s or plan.is_shared):
            most = max(most, self._stage_cost.tokens_within(rows_s, begun))
        # A step computes a few stages of a run, so the run itself may be large.
        return StageAllowance(most, max(self.token_budget, most), is_whole=False)
