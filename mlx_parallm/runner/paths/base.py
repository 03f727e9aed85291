"""What every way of running a forward offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_parallm.batch import ScheduledSequence


class ForwardPath(Protocol):
    """Runs the sequences of a step through a model."""

    @property
    def name(self) -> str:
        """One of "packed", "split", "sequential" and "alone"."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether sequences keep anything besides their KV blocks."""
        ...

    def logits(self, sequences: Sequence[ScheduledSequence], rows: Sequence[int]) -> mx.array:
        """Logits of some of the step's tokens, lazy, ``[len(rows), vocab]``.

        ``rows`` are ascending indices into the concatenation of all sequences' tokens. With none,
        whatever is returned must not be evaluated.
        """
        ...

    def arrays(self) -> list[mx.array]:
        """What this step wrote; to be evaluated with its outputs."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks ``(source, target)`` in every layer."""
        ...

    def copy_state(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy per-sequence state ``(source slot, target slot)``."""
        ...
