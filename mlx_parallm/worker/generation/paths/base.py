"""The interface of all forward paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.paged_cache import KVPools
from mlx_parallm.worker.generation.paths.compiled_decode import CompiledDecode
from mlx_parallm.worker.generation.state_store import StateStore
from mlx_parallm.worker.lora.context import AdapterContext


def adapter_slots(sequences: Sequence[ScheduledSequence]) -> np.ndarray | None:
    """Return the adapter slot of every token of a step, int32 ``[T]``; None if none has one."""
    if not any(sequence.adapter_slot for sequence in sequences):
        return None
    slots = np.array([sequence.adapter_slot for sequence in sequences], dtype=np.int32)
    return slots.repeat([len(sequence.token_ids) for sequence in sequences])


def is_decode(sequences: Sequence[ScheduledSequence], rows: Sequence[int]) -> bool:
    """True if every sequence decodes one token, which is no input's row, and needs its logits.

    Decoder prompts of one token are as usual for sources as others are not.
    """
    return len(rows) == len(sequences) and all(
        len(row.token_ids) == 1 and (row.start > 0 or row.source) and not row.inputs
        for row in sequences
    )


class ForwardPath(Protocol):
    """Runs the sequences of a step through a model."""

    name: str
    """The path's name: "packed", "split", "sequential" or "alone"."""

    keeps_states: bool
    """See ``RunnerInfo``."""

    selects_rows: bool
    """True if the head computes only the rows that need logits."""

    adapters: AdapterContext
    """The context from which layers read the adapters of a step's rows."""

    @property
    def has_state(self) -> bool:
        """True if sequences have a state besides their KV blocks."""
        ...

    @property
    def is_compiled(self) -> bool:
        """True if steps of decode rows are calls of a compiled function."""
        ...

    @property
    def builds_beside(self) -> bool:
        """True if a step of decode rows can be built while the one before is being submitted.

        It is a call of a compiled function then, and takes nothing from the step before but tokens.
        """
        ...

    def begin_step(self) -> None:
        """Note that another step is built from now on."""
        ...

    def before_traces(self, join: Callable[[], None]) -> None:
        """Call ``join`` before a step is traced, because the model's own code runs then."""
        ...

    def settle_writes(self) -> None:
        """Let later steps depend on no write of this one, which is being submitted or was."""
        ...

    def logits(
        self, sequences: Sequence[ScheduledSequence], token_ids: mx.array, rows: Sequence[int]
    ) -> mx.array:
        """Return the logits of some of the step's tokens, lazy, ``[len(rows), vocab]``.

        Args:
            sequences: the step's sequences.
            token_ids: all their tokens one after the other, int32 ``[T]``, with pending ones
                filled in.
            rows: ascending indices into ``token_ids``. If there are none, the result must not be
                evaluated.
        """
        ...

    def arrays(self) -> list[mx.array]:
        """Return the arrays that the step wrote; they must be evaluated with its outputs."""
        ...

    def forget_writes(self) -> None:
        """Drop the KV writes of a step that failed; no step may be in flight."""
        ...

    def forget_weights(self) -> None:
        """Drop what was compiled with weights that have been replaced."""
        ...

    def release_kv(self) -> None:
        """Free all KV and state until ``restore_kv``; no step may run in between."""
        ...

    def restore_kv(self, num_blocks: int | None = None) -> None:
        """Allocate memory for KV again, empty; ``num_blocks``: of another size than before."""
        ...

    @property
    def pools(self) -> KVPools | None:
        """Return the KV of all layers by block; None if sequences have caches of their own."""
        ...

    @property
    def states(self) -> StateStore | None:
        """Return what sequences have besides KV, by slot; None if they have caches of their own."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks ``(source, target)`` in every layer."""
        ...

    def copy_state(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy per-sequence state ``(source slot, target slot)``; called once before each step."""
        ...

    def capture_state(self, pairs: Sequence[tuple[int, int]]) -> dict[int, mx.array]:
        """Copy per-sequence state ``(source slot, target slot)`` into memory of its own.

        Return, by target, True if the state has a NaN, lazy bool ``[]``.
        """
        ...


class PooledPath(ForwardPath):
    """A path whose KV is in pools and whose other state has slots.

    Attributes:
        adapters: see ``ForwardPath``.
        keeps_states: see ``ForwardPath``.
        selects_rows: see ``ForwardPath``.
    """

    keeps_states = False
    selects_rows = True

    def __init__(self, pools: KVPools, states: StateStore) -> None:
        """Begin without compiled steps.

        Args:
            pools: the KV of the layers.
            states: what sequences have besides KV.
        """
        self._pools = pools
        self._states = states
        self._compiled: CompiledDecode | None = None
        self.adapters = AdapterContext()

    @property
    @override
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @property
    def _functions(self) -> Sequence[CompiledDecode]:
        """Return all compiled functions of the path."""
        return () if self._compiled is None else (self._compiled,)

    @override
    def begin_step(self) -> None:
        for function in self._functions:
            function.begin_step()

    @property
    @override
    def builds_beside(self) -> bool:
        compiled = self._compiled
        return compiled is not None and compiled.builds_beside and not self._states.has_state

    @override
    def before_traces(self, join: Callable[[], None]) -> None:
        for function in self._functions:
            function.before_trace = join

    @override
    def settle_writes(self) -> None:
        # The functions have the same pools.
        if self._compiled is not None:
            self._compiled.settle()

    @property
    @override
    def has_state(self) -> bool:
        return self._states.has_state

    @override
    def arrays(self) -> list[mx.array]:
        return self._pools.arrays() + self._states.take_written()

    @override
    def forget_writes(self) -> None:
        self._pools.forget_writes()
        self._states.forget_writes()
        for function in self._functions:
            function.forget_fetched()

    @override
    def forget_weights(self) -> None:
        for function in self._functions:
            function.forget()

    @override
    def release_kv(self) -> None:
        self._pools.release()
        self._states.forget()
        # Pools that are written in place are constants of the traces.
        self.forget_weights()

    @override
    def restore_kv(self, num_blocks: int | None = None) -> None:
        self._pools.restore(num_blocks)

    @property
    @override
    def pools(self) -> KVPools:
        return self._pools

    @property
    @override
    def states(self) -> StateStore:
        return self._states

    @override
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._pools.copy_blocks(pairs)

    @override
    def copy_state(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._states.copy(source, target)
        self._states.drop_kept()

    @override
    def capture_state(self, pairs: Sequence[tuple[int, int]]) -> dict[int, mx.array]:
        return {target: self._states.capture(source, target) for source, target in pairs}
