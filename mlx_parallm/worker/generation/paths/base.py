"""What every way of running a forward offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.lora.context import AdapterContext


def adapter_slots(sequences: Sequence[ScheduledSequence]) -> np.ndarray | None:
    """The adapter slot of every token of a step, int32 ``[T]``; None if all are without."""
    if not any(one.adapter_slot for one in sequences):
        return None
    slots = np.array([one.adapter_slot for one in sequences], dtype=np.int32)
    return slots.repeat([len(one.token_ids) for one in sequences])


def is_decode(sequences: Sequence[ScheduledSequence], rows: Sequence[int]) -> bool:
    """Return True if every sequence goes on by one token, no input's row, and wants its logits."""
    return len(rows) == len(sequences) and all(
        len(row.token_ids) == 1 and row.start > 0 and not row.inputs for row in sequences
    )


class ForwardPath(Protocol):
    """Runs the sequences of a step through a model."""

    @property
    def name(self) -> str:
        """One of "packed", "split", "sequential" and "alone"."""
        ...

    @property
    def adapters(self) -> AdapterContext:
        """What layers are told of the adapters of a step's rows."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether sequences keep anything besides their KV blocks."""
        ...

    @property
    def is_compiled(self) -> bool:
        """Whether steps of decode rows are calls of a compiled function."""
        ...

    def logits(
        self, sequences: Sequence[ScheduledSequence], token_ids: mx.array, rows: Sequence[int]
    ) -> mx.array:
        """Logits of some of the step's tokens, lazy, ``[len(rows), vocab]``.

        ``token_ids`` int32 ``[T]`` are the tokens of all sequences one after the other, those
        that were pending included. ``rows`` are ascending indices into them. With none, whatever
        is returned must not be evaluated.
        """
        ...

    def arrays(self) -> list[mx.array]:
        """What this step wrote; to be evaluated with its outputs."""
        ...

    def forget_writes(self) -> None:
        """Depend no more on KV writes of a step that failed; nothing may be in flight."""
        ...

    def forget_weights(self) -> None:
        """Depend no more on weights of the model that were replaced."""
        ...

    def release_kv(self) -> None:
        """Keep no KV and no state, nor memory for them, until ``restore_kv``; nothing may run."""
        ...

    def restore_kv(self) -> None:
        """Have memory for KV again, empty."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks ``(source, target)`` in every layer."""
        ...

    def copy_state(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy per-sequence state ``(source slot, target slot)``."""
        ...
