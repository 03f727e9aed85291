"""The forward of a step of decode rows as one compiled function.

Most steps decode one token of every sequence. Their forwards differ only in their index arrays, so
MLX can repeat the operations that it traced once. That costs the host a tenth of running the
model's Python (``docs/decisions/008-compiled-decode.md``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.shape_buckets import padded_blocks, padded_rows
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import CompilableAttention, LayerPool
from mlx_parallm.worker.device.step_arrays import step_arrays
from mlx_parallm.worker.generation.paged_cache import PackedStep, positions_of
from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.generation.source_rows import SourceRows
from mlx_parallm.worker.generation.state_store import States, StateStore
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import NO_ADAPTER, AdapterRows

# _Traced: logits, what the head read, the chains of the pools, and states.
_Traced = tuple[mx.array, list[mx.array], list[list[mx.array]], States]


class CompiledDecode:
    """Compiles a forward for decode steps.

    Weights and pools become constants of the trace, so ``forget`` must be called when they are
    replaced. States, adapters and the arrays that order writes to the pools are arguments. Steps
    without adapters have a trace of their own, so that they cost nothing for resident adapters.
    """

    def __init__(
        self,
        forward: Callable[[mx.array, PackedStep, States], mx.array],
        pools: Sequence[LayerPool],
        backend: CompilableAttention,
        adapters: AdapterContext,
        states: StateStore,
        selector: RowSelector,
        sources: SourceRows | None = None,
    ) -> None:
        """Prepare to compile a forward.

        Args:
            forward: returns logits ``[T, 1, vocab]`` of tokens ``[T]``, with the adapters that
                ``adapters`` says. It replaces the arrays in its states, which have T rows too.
            pools: the KV pools of the layers.
            backend: the attention backend.
            adapters: the adapters of the rows.
            states: the states of all sequences.
            selector: notes what the head reads.
            sources: plans the cross-attention of rows; None for a model without an encoder.
        """
        self._forward = forward
        self._adapters = adapters
        self._pools = pools
        self._backend = backend
        self._states = states
        self._selector = selector
        self._source_rows = sources
        #: Called before a step is traced.
        self.before_trace: Callable[[], None] = _do_nothing
        self._gathered: int | None = None
        self._kinds: Any = None
        self._source_kinds: Any = None
        self._arrays = step_arrays()
        self.forget()

    def forget(self) -> None:
        """Drop the traces, because weights were replaced; the next step makes new ones."""
        self._plain = mx.compile(self._run)
        self._adapted = mx.compile(self._run_adapted)
        # What steps that were traced differ in.
        self._traced: set[Hashable] = set()

    def begin_step(self) -> None:
        """Note that what is fetched from now on belongs to another step."""
        self._arrays.begin_step()

    def forget_fetched(self) -> None:
        """Drop the arrays of steps, some of which failed; no step may be in flight."""
        self._arrays.forget()

    @property
    def is_ready(self) -> bool:
        """True after ``learn``."""
        knows_sources = self._source_rows is None or self._source_kinds is not None
        return self._kinds is not None and knows_sources

    @property
    def builds_beside(self) -> bool:
        """See ``ForwardPath.builds_beside``."""
        return self.is_ready and self._backend.runs_in_order and self._source_rows is None

    def settle(self) -> None:
        """See ``ForwardPath.settle_writes``."""
        if self._backend.runs_in_order:
            for pool in self._pools:
                self._backend.settle(pool)

    def learn(self, plan: Any, gathered: int | None = None, *, source_plan: Any = None) -> None:
        """Note what the layers asked of the plan of a step of decode rows.

        Args:
            plan: the step's.
            gathered: the block size if layers gather keys by ``PackedStep.tables``, else None. With
                it, each bucket of table lengths has a trace of its own.
            source_plan: the plan of the step's cross-attention; None without sources.
        """
        self._kinds = self._backend.decode_kinds(plan)
        self._source_kinds = (
            None if source_plan is None else self._backend.decode_kinds(source_plan)
        )
        self._gathered = gathered

    def logits(
        self,
        sequences: Sequence[ScheduledSequence],
        token_ids: mx.array,
        adapter_slots: np.ndarray | None = None,
    ) -> mx.array:
        """Return the logits after each sequence's one token, ``[len(sequences), vocab]``.

        Args:
            sequences: the sequences, with one token each.
            token_ids: their tokens, int32 ``[T]``.
            adapter_slots: their adapters' slots, int32 ``[T]``; None if no sequence has an adapter.
        """
        slots, num_rows = [sequence.slot for sequence in sequences], padded_rows(len(sequences))
        states = self._states.fetch(slots, num_rows)
        logits, states = self.run(sequences, token_ids, adapter_slots, num_rows, states)
        self._states.commit(slots, states, num_rows)
        return logits

    def run(
        self,
        sequences: Sequence[ScheduledSequence],
        token_ids: mx.array,
        adapter_slots: np.ndarray | None,
        num_rows: int,
        states: States,
    ) -> tuple[mx.array, Any]:
        """Return logits as ``logits`` does, and what the forward made of ``states``.

        The step has ``num_rows`` rows with padding.
        """
        count = len(sequences)
        positions = np.zeros(num_rows, dtype=np.int32)
        positions[:count] = [sequence.start for sequence in sequences]
        rotary = positions
        if any(sequence.rope_offsets for sequence in sequences):
            rotary = np.zeros(num_rows, dtype=np.int32)
            rotary[:count] = positions_of(sequences)
        if num_rows > count:
            token_ids = mx.concatenate([token_ids, mx.zeros(num_rows - count, mx.int32)])
        arrays = [rotary, *self._backend.decode_arrays(sequences, positions, self._kinds)]
        shapes = [list(array.shape) for array in arrays]
        width = self._table_width(sequences)
        kind = num_rows, tuple(map(tuple, shapes)), width, adapter_slots is None
        if kind not in self._traced:
            self.before_trace()
        # On CUDA, the device would wait for the pages of each array apart.
        packed = self._arrays.fetch(np.concatenate([array.ravel() for array in arrays]))
        source_arrays = None
        if self._source_rows is not None:
            source_arrays = self._source_rows.decode_arrays(sequences, num_rows, self._source_kinds)
        inputs = (token_ids, packed, shapes, source_arrays, self._chains(), states, width)
        if adapter_slots is None:
            logits, hidden, chains, states = self._plain(*inputs)
        else:
            padded_slots = np.full(num_rows, NO_ADAPTER, dtype=np.int32)
            padded_slots[:count] = adapter_slots
            adapted = (mx.array(padded_slots), self._adapters.arrays(), self._adapters.key)
            logits, hidden, chains, states = self._adapted(*inputs, *adapted)
        # A trace that failed is made again.
        self._traced.add(kind)
        self._set_chains(chains)
        self._selector.note(hidden)
        return logits[:count], states

    def _run_adapted(  # noqa: PLR0913 - those of `_run`, and the adapters
        self,
        token_ids: mx.array,
        packed: mx.array,
        shapes: Sequence[Sequence[int]],
        source_arrays: list[mx.array] | None,
        chains: list[list[mx.array]],
        states: States,
        width: int,
        slots: mx.array,
        stacks: list[list[mx.array]],
        key: str,
    ) -> _Traced:
        """Run the traced forward with adapters; their arrays are restored at the end.

        ``key`` is an argument so that another set of adapted modules is traced anew, even if all
        shapes are the same.
        """
        del key
        before = self._adapters.arrays()
        self._adapters.set_arrays(stacks)
        try:
            with self._adapters.during(AdapterRows(slots)):
                return self._run(token_ids, packed, shapes, source_arrays, chains, states, width)
        finally:
            self._adapters.set_arrays(before)

    def _run(
        self,
        token_ids: mx.array,
        packed: mx.array,
        shapes: Sequence[Sequence[int]],
        source_arrays: list[mx.array] | None,
        chains: list[list[mx.array]],
        states: States,
        width: int,
    ) -> _Traced:
        """Run the traced forward. The pools are restored.

        Args:
            token_ids: the tokens of the rows, int32 ``[T]``.
            packed: positions and the arrays of the step's plan, one after the other, int32.
            shapes: the shapes of these.
            source_arrays: the arrays of the plan of cross-attention; None if there are none.
            chains: what orders the writes to each pool.
            states: the rows' states.
            width: see ``_table_width``.
        """
        before = self._chains()
        self._set_chains(chains)
        try:
            positions, *arrays = _unpacked(packed, shapes)
            plan = self._backend.decode_plan(arrays, self._kinds)
            source_plan = None
            if source_arrays is not None:
                source_plan = self._backend.decode_plan(source_arrays, self._source_kinds)
            tables = self._backend.decode_tables(plan)[:, :width] if width else None
            step = PackedStep(self._backend, plan, positions, tables, source_plan=source_plan)
            # The forward replaces entries, and the caller's lists must stay as they are.
            states = [list(entries) for entries in states]
            with self._selector.noting() as hidden:
                logits = self._forward(token_ids, step, states)
            return logits[:, 0], hidden, self._chains(), states
        finally:
            self._set_chains(before)

    def _table_width(self, sequences: Sequence[ScheduledSequence]) -> int:
        """Return the number of blocks that are gathered per row, as a bucket; 0 for none."""
        if self._gathered is None:
            return 0
        return padded_blocks(max(sequence.start for sequence in sequences) // self._gathered + 1)

    def _chains(self) -> list[list[mx.array]]:
        return [self._backend.chain(pool) for pool in self._pools]

    def _set_chains(self, chains: Sequence[Sequence[mx.array]]) -> None:
        for pool, arrays in zip(self._pools, chains, strict=True):
            self._backend.set_chain(pool, arrays)


def _do_nothing() -> None:
    pass


def _unpacked(packed: mx.array, shapes: Sequence[Sequence[int]]) -> list[mx.array]:
    """Return arrays of these shapes, which are one after the other in ``packed``, as views."""
    arrays, first = [], 0
    for shape in shapes:
        size = math.prod(shape)
        arrays.append(packed[first : first + size].reshape(shape))
        first += size
    return arrays
