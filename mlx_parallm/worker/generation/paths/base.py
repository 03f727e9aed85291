"""The interface of all forward paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.lora.context import AdapterContext


def adapter_slots(sequences: Sequence[ScheduledSequence]) -> np.ndarray | None:
    """Return the adapter slot of every token of a step, int32 ``[T]``; None if none has one."""
    if not any(sequence.adapter_slot for sequence in sequences):
        return None
    slots = np.array([sequence.adapter_slot for sequence in sequences], dtype=np.int32)
    return slots.repeat([len(sequence.token_ids) for sequence in sequences])


def is_decode(sequences: Sequence[ScheduledSequence], rows: Sequence[int]) -> bool:
    """True if every sequence decodes one token, which is no input's row, and needs its logits."""
    return len(rows) == len(sequences) and all(
        len(row.token_ids) == 1 and row.start > 0 and not row.inputs for row in sequences
    )


class ForwardPath(Protocol):
    """Runs the sequences of a step through a model."""

    name: str
    """The path's name: "packed", "split", "sequential" or "alone"."""

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

    def restore_kv(self) -> None:
        """Allocate memory for KV again, empty."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks ``(source, target)`` in every layer."""
        ...

    def copy_state(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy per-sequence state ``(source slot, target slot)``."""
        ...
