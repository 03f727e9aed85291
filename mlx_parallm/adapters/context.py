"""Which adapters the rows of the forward in progress have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


class AdapterContext:
    """Told by whoever runs a forward, asked by the layers in it.

    Attributes:
        slots: int32 ``[B]`` of the inputs ``[B, L, ...]`` that layers get; None while no row of the
            forward has an adapter.
        wanted: the rows that the head picks out of all, int32; None where it picks none.
    """

    def __init__(self) -> None:
        self.slots: mx.array | None = None
        self.wanted: mx.array | None = None

    @contextmanager
    def during(self, slots: mx.array | None, wanted: mx.array | None = None) -> Iterator[None]:
        """Let layers see these while the block runs."""
        before = self.slots, self.wanted
        self.slots, self.wanted = slots, wanted
        try:
            yield
        finally:
            self.slots, self.wanted = before
