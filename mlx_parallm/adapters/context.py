"""Which adapters there are, and which of them the rows of the forward in progress have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from mlx_parallm.adapters.rows import AdapterRows
from mlx_parallm.adapters.stack import AdapterStack, capacity


class AdapterContext:
    """Told by whoever runs a forward, asked by the layers in it.

    Attributes:
        rows: of the inputs ``[B, L, ...]`` that layers get; None while none of the forward has an
            adapter.
        wanted: the rows that the head picks out of all, int32; None where it picks none.
        stacks: what resident adapters change, by module path.
    """

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None
        self.wanted: mx.array | None = None
        self.stacks: dict[str, AdapterStack] = {}
        self._num_slots = 1

    @property
    def num_slots(self) -> int:
        """How many slots every stack has room for, slot 0 included."""
        return self._num_slots

    def reserve(self, num_slots: int) -> None:
        """Let every stack have room for so many slots."""
        self._num_slots = max(self._num_slots, capacity(num_slots))
        for stack in self.stacks.values():
            # Rows name slots in every layer, whether their adapters change it or not.
            stack.reserve(self._num_slots)

    @property
    def key(self) -> str:
        """Changes with the modules that are changed."""
        return "\n".join(sorted(self.stacks))

    def arrays(self) -> list[list[mx.array]]:
        """Those of all stacks."""
        return [self.stacks[path].arrays() for path in sorted(self.stacks)]

    def set_arrays(self, arrays: Sequence[Sequence[mx.array]]) -> None:
        """Let layers use others, in the order of ``arrays``."""
        for path, others in zip(sorted(self.stacks), arrays, strict=True):
            self.stacks[path].set_arrays(others)

    @contextmanager
    def during(self, rows: AdapterRows | None, wanted: mx.array | None = None) -> Iterator[None]:
        """Let layers see these while the block runs."""
        before = self.rows, self.wanted
        self.rows, self.wanted = rows, wanted
        try:
            yield
        finally:
            self.rows, self.wanted = before
