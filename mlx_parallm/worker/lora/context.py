"""The resident adapters of a model, and which of them the rows of a forward have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx

from mlx_parallm.worker.lora.change_kernels import ChangeKernels
from mlx_parallm.worker.lora.rows import AdapterRows
from mlx_parallm.worker.lora.stack import AdapterStack, capacity


class AdapterContext:
    """The state that adapted layers read about the forward that they are part of.

    The path that runs the forward sets it.

    Attributes:
        rows: the adapters of the rows of layers' inputs ``[B, L, ...]``; None if no row has one.
        kernels: the kernels for linear layers of decode rows; None to use MLX's operations alone.
        forward_id: a number that differs between forwards.
    """

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None
        self.kernels: ChangeKernels | None = None
        self.forward_id = 0
        self._stacks: dict[str, AdapterStack] = {}
        self._num_slots = 1
        self._key = ""

    @property
    def num_slots(self) -> int:
        """Slots that every stack has room for, slot 0 included."""
        return self._num_slots

    def reserve(self, num_slots: int) -> None:
        """Make room for so many slots in every stack."""
        self._num_slots = max(self._num_slots, capacity(num_slots))
        for stack in self.stacks.values():
            # Every layer is indexed by the slots of the rows, even if their adapters skip it.
            stack.reserve(self._num_slots)

    @property
    def stacks(self) -> Mapping[str, AdapterStack]:
        """The changes that resident adapters make, by module path."""
        return self._stacks

    def set_stacks(self, stacks: Mapping[str, AdapterStack]) -> None:
        """Replace the stacks: only the modules with these paths are changed from now on."""
        self._stacks = dict(sorted(stacks.items()))
        self._key = hashlib.sha256("\n".join(self._stacks).encode()).hexdigest()

    @property
    def key(self) -> str:
        """A key of the set of changed modules; equal iff the modules are the same."""
        return self._key

    def arrays(self) -> list[list[mx.array]]:
        """Return the arrays of each stack, in the order of their paths."""
        return [stack.arrays() for stack in self._stacks.values()]

    def set_arrays(self, arrays: Sequence[Sequence[mx.array]]) -> None:
        """Replace the arrays of all stacks; ``arrays`` is ordered as the method ``arrays``."""
        for stack, own_arrays in zip(self._stacks.values(), arrays, strict=True):
            stack.set_arrays(own_arrays)

    @contextmanager
    def during(self, rows: AdapterRows | None) -> Iterator[None]:
        """Set ``rows`` for the forward that runs inside the context."""
        before, self.rows = self.rows, rows
        self.forward_id += 1
        try:
            yield
        finally:
            self.rows = before
            self.forward_id += 1

    @contextmanager
    def changed_by(self, stacks: Mapping[str, AdapterStack]) -> Iterator[None]:
        """Let these stacks change a forward in place of the resident adapters, without kernels.

        The graph of a forward keeps the arrays that it was built from, so resident adapters and
        steps in flight are not affected.
        """
        before = self._stacks, self._key, self.kernels
        self.set_stacks(stacks)
        self.kernels = None
        try:
            with self.during(AdapterRows(mx.zeros(1, mx.int32))):
                yield
        finally:
            self._stacks, self._key, self.kernels = before
