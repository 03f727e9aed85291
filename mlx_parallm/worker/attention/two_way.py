"""Attention of rows that see later ones: those of one image, where a model reads it both ways.

Their keys are all in the pool when a step attends, because such rows are never cut. The backend
computes them as causal rows with all others, and they are computed again here, so that no kernel
needs to know of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.vision.features import TwoWay
from mlx_parallm.worker.attention.base import AttentionBackend, LayerPool
from mlx_parallm.worker.attention.dense import dense_attention


@dataclass(frozen=True, slots=True)
class TwoWaySpan:
    """Rows of one sequence that attend to each other.

    Attributes:
        row: index of the first one among the step's rows.
        num_rows: how many there are.
        position: of the first one.
        start: position of the first row of the whole span, of which earlier rows may be computed.
        blocks: the KV blocks of all positions up to the last one's.
        two_way: in which layers they see later ones.
    """

    row: int
    num_rows: int
    position: int
    start: int
    blocks: tuple[int, ...]
    two_way: TwoWay = TwoWay.ALL_LAYERS

    def applies(self, window: int | None) -> bool:
        """True if the rows see later ones in layers with this window."""
        return self.two_way is TwoWay.ALL_LAYERS or window is not None

    def mask(self, window: int | None, num_keys: int) -> np.ndarray:
        """Return which keys the rows see, bool ``[num_rows, num_keys]``."""
        rows = np.arange(self.position, self.position + self.num_rows)[:, None]
        keys = np.arange(num_keys)
        seen = np.broadcast_to(keys < self.position + self.num_rows, (self.num_rows, num_keys))
        if window is not None:
            is_near = keys > rows - window
            if self.two_way is TwoWay.ALL_LAYERS:
                is_near = is_near | (keys >= self.start)
            seen = seen & is_near
        return seen


class TwoWayRows:
    """The spans of the step that is being built."""

    def __init__(self) -> None:
        self._spans: Sequence[TwoWaySpan] = ()

    @contextmanager
    def during(self, spans: Sequence[TwoWaySpan]) -> Iterator[None]:
        """Let these rows see each other for a while."""
        self._spans = spans
        try:
            yield
        finally:
            self._spans = ()

    def apply(
        self,
        output: mx.array,
        backend: AttentionBackend,
        pool: LayerPool,
        queries: mx.array,
        *,
        scale: float,
        window: int | None,
        **options: Any,
    ) -> mx.array:
        """Return a layer's attention ``[T, H, 1, V]`` with the rows of spans computed anew.

        The arguments are those of ``AttentionBackend.attend``, and its result.
        """
        for span in self._spans:
            if not span.applies(window):
                continue
            rows = slice(span.row, span.row + span.num_rows)
            keys, values = backend.gather(pool, mx.array([list(span.blocks)], mx.int32))
            own = dense_attention(
                queries[rows, :, 0].swapaxes(0, 1)[None].astype(keys.dtype),
                keys,
                values,
                scale=scale,
                mask=mx.array(span.mask(window, keys.shape[2])),
                **{"sinks": None, "soft_cap": None, **options},
            )
            output[rows] = own[0].swapaxes(0, 1)[:, :, None].astype(output.dtype)
        return output
