"""Token masks of a step's constrained rows, computed while the model runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from mlx_parallm.grammar.masks import ConstrainedRow, GrammarMasks, RowMasks
from mlx_parallm.types.step import ScheduledBatch
from mlx_parallm.worker.generation.step_rows import StepRows
from mlx_parallm.worker.sampling.sampler import TokenMasks


@dataclass(frozen=True, slots=True)
class Constraints:
    """The effect of grammars on a step.

    Attributes:
        masks: the masks of constrained rows; None if there are none to apply.
        failed: by sequence, why no token can be chosen for it.
    """

    masks: TokenMasks | None = None
    failed: Mapping[int, str] = field(default_factory=dict)


class GrammarRows:
    """Computes the token masks of steps; without constrained rows it does nothing."""

    def __init__(self, masks: GrammarMasks | None) -> None:
        """``masks`` is None if grammars cannot be compiled for the model's tokens."""
        self._masks = masks

    def forget(self, batch: ScheduledBatch) -> None:
        """Drop the matchers of sequences that have ended."""
        if batch.ended and self._masks is not None:
            self._masks.forget(batch.ended)

    def constrain(
        self,
        rows: StepRows,
        begin_forward: Callable[[], None],
        read_pending: Callable[[], Mapping[int, int]],
    ) -> Constraints:
        """Return the masks of a step whose forward was built.

        Args:
            rows: the step's rows. Where a mask forbids the banned tokens, ``banned_ids`` is
                cleared.
            begin_forward: starts the forward on the device; on a CPU it returns when it has ended.
            read_pending: waits for the previous step and returns the tokens it chose, by sequence.
                It is called by another thread, and only if a row depends on such a token.
        """
        constrained = [
            ConstrainedRow(row, seq_id, spec)
            for row, (seq_id, spec) in enumerate(zip(rows.sampled_ids, rows.specs, strict=True))
            if spec.params.grammar is not None
        ]
        if not constrained:
            return Constraints()
        if self._masks is None:
            seq_ids = [row.seq_id for row in constrained]
            return Constraints(None, dict.fromkeys(seq_ids, "This model has no grammars."))
        is_pending = any(row.spec.has_pending for row in constrained)
        masks = self._compute(
            self._masks, constrained, begin_forward, read_pending if is_pending else dict
        )
        for row in constrained:
            if row.spec.banned_ids:
                rows.specs[row.row] = replace(row.spec, banned_ids=())
        tokens = TokenMasks(masks.rows, masks.words) if masks.rows else None
        return Constraints(tokens, masks.failed)

    def _compute(
        self,
        masks: GrammarMasks,
        constrained: list[ConstrainedRow],
        begin_forward: Callable[[], None],
        read_pending: Callable[[], Mapping[int, int]],
    ) -> RowMasks:
        """Return the masks, computed by another thread while this thread starts the forward.

        Neither thread holds the interpreter lock for long.
        """
        future = self._worker.submit(lambda: masks.compute(constrained, read_pending()))
        try:
            begin_forward()
        finally:
            computed = future.result()
        return computed

    @functools.cached_property
    def _worker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
