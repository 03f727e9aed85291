"""Cross-attention of a step's rows: which blocks each of them reads, and how sources get there.

A row attends to its whole source. So it is a decode row at the source's last position, over the
block table of the source, and every attention backend computes that already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence, SourceTable
from mlx_parallm.worker.attention.base import AttentionBackend, CompilableAttention, LayerPool

# KEPT: with beams, steps with and without their rows take turns.
KEPT = 2


@dataclass(slots=True)
class _Latest:
    """A plan of the rows of a step, or its arrays.

    Attributes:
        sources: of the rows.
        num_rows: the rows with padding.
        made: a plan, or its arrays.
    """

    sources: list[SourceTable]
    num_rows: int
    made: Any


class SourceRows:
    """Plans the cross-attention of steps.

    Most steps have the rows of one of the steps before them, at the same positions of the same
    sources. So the latest plans are kept, with all that layers cached in them.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        """``backend`` is that of the pools."""
        self._backend = backend.with_own_tables()
        self._plans: deque[_Latest] = deque(maxlen=KEPT)
        self._arrays: deque[_Latest] = deque(maxlen=KEPT)
        # The rows that were made last, by the id of their source, which the row's entry keeps.
        self._rows: dict[int, tuple[SourceTable, ScheduledSequence]] = {}

    def plan(self, sequences: Sequence[ScheduledSequence], num_rows: int | None = None) -> Any:
        """Return the plan of the tokens of all sequences; None if they have no sources.

        Args:
            sequences: of the step.
            num_rows: the rows with padding; None for no padding.
        """
        sources = sources_of(sequences)
        if not sources:
            return None
        count = len(sources) if num_rows is None else num_rows
        return _kept(self._plans, sources, count, self._make_plan)

    def _make_plan(self, sources: Sequence[SourceTable], num_rows: int) -> Any:
        rows = self._rows_of(sources)
        if num_rows == len(rows):
            return self._backend.plan(rows)
        assert isinstance(self._backend, CompilableAttention), "only such backends pad rows"
        return self._backend.padded_plan(rows, num_rows)

    def decode_arrays(
        self, sequences: Sequence[ScheduledSequence], num_rows: int, kinds: Any
    ) -> list[mx.array] | None:
        """Return the arrays of a compiled step's cross-attention; None if there are no sources.

        Args:
            sequences: of the step, with one token each.
            num_rows: the rows with padding.
            kinds: see ``CompilableAttention.decode_arrays``; they are those of every call.
        """
        sources = sources_of(sequences)
        if not sources:
            return None
        backend = self._backend
        assert isinstance(backend, CompilableAttention), "only such steps are compiled"

        def make(sources: Sequence[SourceTable], num_rows: int) -> list[mx.array]:
            positions = np.zeros(num_rows, dtype=np.int32)
            positions[: len(sources)] = [source.num_tokens - 1 for source in sources]
            arrays = backend.decode_arrays(self._rows_of(sources), positions, kinds)
            return [mx.array(array) for array in arrays]

        return _kept(self._arrays, sources, num_rows, make)

    def _rows_of(self, sources: Sequence[SourceTable]) -> list[ScheduledSequence]:
        """Return a row for each source; those of the call before are taken over."""
        before, self._rows = self._rows, {}
        for source in sources:
            key = id(source)
            if key not in self._rows:
                self._rows[key] = before.get(key) or (source, _row(source, source.num_tokens - 1))
        return [self._rows[id(source)][1] for source in sources]

    def write(
        self,
        pools: Sequence[LayerPool],
        sources: Sequence[SourceTable],
        layers: Iterable[tuple[mx.array, mx.array]],
    ) -> None:
        """Write the keys and values of sources into their blocks, lazily.

        Args:
            pools: of the decoder layers.
            sources: where they go.
            layers: keys ``[T, K, 1, D]`` and values ``[T, K, 1, V]`` of each decoder layer, one
                source after the other.
        """
        plan = self._backend.plan([_row(source, 0, source.num_tokens) for source in sources])
        for pool, (keys, values) in zip(pools, layers, strict=True):
            self._backend.write(pool, plan, keys, values)


def _kept(
    latest: deque[_Latest],
    sources: list[SourceTable],
    num_rows: int,
    make: Callable[[Sequence[SourceTable], int], Any],
) -> Any:
    """Return what was made for these rows, or make it and drop the oldest."""
    for each in latest:
        if each.num_rows == num_rows and each.sources == sources:
            return each.made
    latest.append(_Latest(sources, num_rows, make(sources, num_rows)))
    return latest[-1].made


def sources_of(sequences: Sequence[ScheduledSequence]) -> list[SourceTable]:
    """Return the source of every token; empty if the sequences have none."""
    if sequences[0].source is None:
        assert all(row.source is None for row in sequences), "only some sequences have a source"
        return []
    sources: list[SourceTable] = []
    for sequence in sequences:
        assert sequence.source is not None, "only some sequences have a source"
        sources += [sequence.source] * len(sequence.token_ids)
    return sources


def _row(source: SourceTable, start: int, num_tokens: int = 1) -> ScheduledSequence:
    """Return rows over the blocks of a source, of no sequence."""
    return ScheduledSequence(
        seq_id=-1,
        slot=0,
        start=start,
        token_ids=(0,) * num_tokens,
        block_table=source.block_table,
    )
