"""Which adapters there are, and which of them the rows of the forward in progress have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx

from mlx_parallm.worker.lora.change_kernels import ChangeKernels
from mlx_parallm.worker.lora.rows import AdapterRows
from mlx_parallm.worker.lora.stack import AdapterStack, capacity


class AdapterContext:
    """Told by whoever runs a forward, asked by the layers in it.

    Attributes:
        rows: of the inputs ``[B, L, ...]`` that layers get; None while none of the forward has an
            adapter.
        wanted: the rows that the head picks out of all, int32; None where it picks none.
        kernels: for linear layers of decode rows; None to use MLX's operations alone.
        forward: another number in every forward.
    """

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None
        self.wanted: mx.array | None = None
        self.kernels: ChangeKernels | None = None
        self.forward = 0
        self._stacks: dict[str, AdapterStack] = {}
        self._num_slots = 1
        self._key = ""

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
    def stacks(self) -> Mapping[str, AdapterStack]:
        """What resident adapters change, by module path."""
        return self._stacks

    def set_stacks(self, stacks: Mapping[str, AdapterStack]) -> None:
        """Let resident adapters change these modules and no others."""
        self._stacks = dict(sorted(stacks.items()))
        self._key = hashlib.sha256("\n".join(self._stacks).encode()).hexdigest()

    @property
    def key(self) -> str:
        """Another one where other modules are changed."""
        return self._key

    def arrays(self) -> list[list[mx.array]]:
        """Those of all stacks, in the order of their paths."""
        return [stack.arrays() for stack in self._stacks.values()]

    def set_arrays(self, arrays: Sequence[Sequence[mx.array]]) -> None:
        """Let layers use others, in the order of ``arrays``."""
        for stack, others in zip(self._stacks.values(), arrays, strict=True):
            stack.set_arrays(others)

    @contextmanager
    def during(self, rows: AdapterRows | None, wanted: mx.array | None = None) -> Iterator[None]:
        """Let layers see these while the block runs."""
        before = self.rows, self.wanted
        self.rows, self.wanted = rows, wanted
        self.forward += 1
        try:
            yield
        finally:
            self.rows, self.wanted = before
            self.forward += 1
