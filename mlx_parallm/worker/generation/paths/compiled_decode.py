"""The forward of a step of decode rows as one compiled function.

Most steps decode one token of every sequence. Their forwards differ in nothing but their index
arrays, so that MLX can repeat the operations it traced once, which costs a tenth of what running
the model's Python does (``docs/decisions/008-compiled-decode.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import CompilableAttention, LayerPool
from mlx_parallm.worker.generation.paged_cache import PackedStep
from mlx_parallm.worker.generation.state_store import States, StateStore
from mlx_parallm.worker.layers.row_counts import padded_blocks, padded_rows
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import NO_ADAPTER, AdapterRows


class CompiledDecode:
    """Compiles a forward for decode steps.

    Weights become constants of what is traced: whoever replaces them must say so. Pools, states and
    adapters are inputs. Steps without adapters are traced for themselves, so that they cost nothing
    more for adapters that others have.
    """

    def __init__(
        self,
        forward: Callable[[mx.array, PackedStep, States], mx.array],
        pools: Sequence[LayerPool],
        backend: CompilableAttention,
        adapters: AdapterContext,
        states: StateStore,
    ) -> None:
        """``forward`` gives logits ``[T, 1, vocab]`` of tokens ``[T]``; it heeds ``adapters``.

        It replaces what is in the states it is given, whose T rows are as those of the tokens.
        """
        self._forward = forward
        self._adapters = adapters
        self._pools = pools
        self._backend = backend
        self._states = states
        self._gathered: int | None = None
        self._kinds: Any = None
        self.forget()

    def forget(self) -> None:
        """Trace anew: weights were replaced."""
        self._plain = mx.compile(self._run)
        self._adapted = mx.compile(self._run_adapted)

    @property
    def is_ready(self) -> bool:
        """Whether a step has shown what the layers ask of a plan."""
        return self._kinds is not None

    def learn(self, plan: Any, gathered: int | None = None) -> None:
        """See what the layers asked of the plan of a step of decode rows.

        ``gathered``: the block size, if they gather keys by ``PackedStep.tables``. The forward is
        then traced anew for longer tables.
        """
        self._kinds = self._backend.decode_kinds(plan)
        self._gathered = gathered

    def logits(
        self,
        sequences: Sequence[ScheduledSequence],
        token_ids: mx.array,
        adapter_slots: np.ndarray | None = None,
    ) -> mx.array:
        """Logits ``[len(sequences), vocab]`` after each sequence's one token, int32 ``[T]``.

        ``adapter_slots``, int32 ``[T]``, are None if no sequence has an adapter.
        """
        count = len(sequences)
        num_rows = padded_rows(count)
        positions = np.zeros(num_rows, dtype=np.int32)
        positions[:count] = [one.start for one in sequences]
        if num_rows > count:
            token_ids = mx.concatenate([token_ids, mx.zeros(num_rows - count, mx.int32)])
        slots = [one.slot for one in sequences]
        inputs = (
            token_ids,
            mx.array(positions),
            self._backend.decode_arrays(sequences, positions, self._kinds),
            self._chains(),
            self._states.fetch(slots, num_rows),
            self._table_width(sequences),
        )
        if adapter_slots is None:
            logits, chains, states = self._plain(*inputs)
        else:
            chosen = np.full(num_rows, NO_ADAPTER, dtype=np.int32)
            chosen[:count] = adapter_slots
            adapted = (mx.array(chosen), self._adapters.arrays(), self._adapters.key)
            logits, chains, states = self._adapted(*inputs, *adapted)
        self._set_chains(chains)
        self._states.commit(slots, states, num_rows)
        return logits[:count]

    def _run_adapted(  # noqa: PLR0913 - those of `_run`, and the adapters
        self,
        token_ids: mx.array,
        positions: mx.array,
        arrays: list[mx.array],
        chains: list[list[mx.array]],
        states: States,
        width: int,
        slots: mx.array,
        stacks: list[list[mx.array]],
        key: str,
    ) -> tuple[mx.array, list[list[mx.array]], States]:
        """The same with adapters, which are back as they were when it ends.

        ``key`` is there so that other modules are traced anew, whatever the shapes.
        """
        del key
        before = self._adapters.arrays()
        self._adapters.set_arrays(stacks)
        try:
            with self._adapters.during(AdapterRows(slots)):
                return self._run(token_ids, positions, arrays, chains, states, width)
        finally:
            self._adapters.set_arrays(before)

    def _run(
        self,
        token_ids: mx.array,
        positions: mx.array,
        arrays: list[mx.array],
        chains: list[list[mx.array]],
        states: States,
        width: int,
    ) -> tuple[mx.array, list[list[mx.array]], States]:
        """What is traced; the pools are back as they were when it ends."""
        before = self._chains()
        self._set_chains(chains)
        try:
            plan = self._backend.decode_plan(arrays, self._kinds)
            tables = self._backend.decode_tables(plan)[:, :width] if width else None
            step = PackedStep(self._backend, plan, positions, tables)
            # Lists of their own: those of the caller are not to change.
            states = [list(entries) for entries in states]
            logits = self._forward(token_ids, step, states)
            return logits[:, 0], self._chains(), states
        finally:
            self._set_chains(before)

    def _table_width(self, sequences: Sequence[ScheduledSequence]) -> int:
        """How many blocks are gathered; 0 if none are."""
        if self._gathered is None:
            return 0
        return padded_blocks(max(one.start for one in sequences) // self._gathered + 1)

    def _chains(self) -> list[list[mx.array]]:
        return [self._backend.chain(pool) for pool in self._pools]

    def _set_chains(self, chains: Sequence[Sequence[mx.array]]) -> None:
        for pool, arrays in zip(self._pools, chains, strict=True):
            self._backend.set_chain(pool, arrays)
