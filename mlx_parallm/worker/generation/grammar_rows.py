"""Masks of a step's constrained rows, computed while the model runs."""

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
    """What grammars make of a step.

    Attributes:
        masks: of constrained rows; None if there is none to apply.
        failed: by sequence, why no token can be chosen for it.
    """

    masks: TokenMasks | None = None
    failed: Mapping[int, str] = field(default_factory=dict)


class GrammarRows:
    """Applies grammars to steps; without constrained rows it does nothing."""

    def __init__(self, masks: GrammarMasks | None) -> None:
        """``masks``: None if this model's tokens can have no grammar."""
        self._masks = masks

    def forget(self, batch: ScheduledBatch) -> None:
        """Drop what belongs to sequences that have ended."""
        if batch.ended and self._masks is not None:
            self._masks.forget(batch.ended)

    def constrain(
        self,
        rows: StepRows,
        begin_forward: Callable[[], None],
        read_pending: Callable[[], Mapping[int, int]],
    ) -> Constraints:
        """The masks of a step whose forward was built.

        Args:
            rows: of the step; tokens that masks take care of are no longer banned in them.
            begin_forward: lets the device begin; on the CPU it returns when that is done.
            read_pending: the tokens that the step before chose, by sequence; waits for them, and is
                called only if a row depends on one, by another thread.
        """
        found = [
            ConstrainedRow(row, seq_id, spec)
            for row, (seq_id, spec) in enumerate(zip(rows.sampled_ids, rows.specs, strict=True))
            if spec.params.grammar is not None
        ]
        if not found:
            return Constraints()
        if self._masks is None:
            return Constraints(None, {one.seq_id: "This model has no grammars." for one in found})
        is_pending = any(one.spec.has_pending for one in found)
        masks = self._compute(
            self._masks, found, begin_forward, read_pending if is_pending else dict
        )
        for one in found:
            if one.spec.banned_ids:
                rows.specs[one.row] = replace(one.spec, banned_ids=())
        tokens = TokenMasks(masks.rows, masks.words) if masks.rows else None
        return Constraints(tokens, masks.failed)

    def _compute(
        self,
        masks: GrammarMasks,
        found: list[ConstrainedRow],
        begin_forward: Callable[[], None],
        read_pending: Callable[[], Mapping[int, int]],
    ) -> RowMasks:
        # Beside the forward's beginning: neither side holds the interpreter long.
        future = self._worker.submit(lambda: masks.compute(found, read_pending()))
        try:
            begin_forward()
        finally:
            computed = future.result()
        return computed

    @functools.cached_property
    def _worker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
