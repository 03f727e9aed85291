"""The packed forward: every token of a step is its own row, ``model(tokens[T, 1])``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.models.seq2seq.interface import is_encoder_decoder
from mlx_parallm.types.shape_buckets import padded_rows, padded_tokens
from mlx_parallm.types.step import ScheduledSequence, SourceTable
from mlx_parallm.worker.attention.base import AttentionBackend, CompilableAttention
from mlx_parallm.worker.attention.dense import TwoWayRows
from mlx_parallm.worker.generation.cache_layout import CacheLayout, KVLayout
from mlx_parallm.worker.generation.paged_cache import KVPools, PackedStep, PagedLayerCache
from mlx_parallm.worker.generation.paths.base import PooledPath, adapter_slots, is_decode
from mlx_parallm.worker.generation.paths.compiled_decode import CompiledDecode
from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.generation.seam import ModelSeams
from mlx_parallm.worker.generation.source_rows import SourceRows
from mlx_parallm.worker.generation.state_store import States, StateStore
from mlx_parallm.worker.lora.rows import AdapterRows


class PackedPath(PooledPath):
    """The path of models in which every layer keeps plain KV. Implements ``ForwardPath``."""

    name = "packed"

    def __init__(
        self,
        model: Any,
        layouts: tuple[CacheLayout, ...],
        pools: KVPools,
        backend: AttentionBackend,
        selector: RowSelector,
        *,
        compiles: bool = False,
    ) -> None:
        """Install the seams in a model.

        Args:
            model: the model.
            layouts: the layouts of its caches.
            pools: the KV pools of its layers.
            backend: the attention backend of the pools.
            selector: selects the rows that the head computes.
            compiles: True to run steps of decode rows by a compiled function.
        """
        super().__init__(pools, StateStore(()))
        self._model = model
        self._windows = [
            layout.window if isinstance(layout, KVLayout) else None for layout in layouts
        ]
        self._backend = backend
        self._selector = selector
        self._seams = ModelSeams(model)
        #: Rows of the next step that see later ones.
        self.two_way = TwoWayRows()
        self._sources = SourceRows(backend) if is_encoder_decoder(model) else None
        self._padding: CompilableAttention | None = None
        if isinstance(backend, CompilableAttention) and backend.pads_rows:
            self._padding = backend
        if compiles and isinstance(backend, CompilableAttention):
            self._compiled = CompiledDecode(
                self._traced,
                pools.layers,
                backend,
                self.adapters,
                self._states,
                selector,
                self._sources,
            )

    @property
    def pads_rows(self) -> bool:
        """True if the rows of steps with prompts are padded to buckets."""
        return self._padding is not None

    @override
    def logits(
        self, sequences: Sequence[ScheduledSequence], token_ids: mx.array, rows: Sequence[int]
    ) -> mx.array:
        slots = adapter_slots(sequences)
        decodes = is_decode(sequences, rows)
        compiled = self._compiled if decodes else None
        if compiled is not None and compiled.is_ready:
            return compiled.logits(sequences, token_ids, slots)
        head_rows = self._head_rows(rows)
        num_rows = token_ids.size if decodes else padded_tokens(token_ids.size)
        if self._padding is not None and num_rows > token_ids.size:
            source_plan = self._source_plan(sequences, num_rows)
            step = PackedStep.padded(self._padding, sequences, num_rows, self.two_way, source_plan)
            token_ids, slots = _padded(token_ids, slots, num_rows)
        else:
            source_plan = self._source_plan(sequences)
            step = PackedStep.of(self._backend, sequences, self.two_way, source_plan)
        adapters = None if slots is None else AdapterRows.of_step(slots)
        with self.adapters.during(adapters):
            logits = self._selector.run(partial(self._forward, token_ids, step), head_rows)
        if compiled is not None:
            compiled.learn(step.plan, source_plan=source_plan)
        return logits[: len(rows)] if 0 < len(rows) < head_rows.size else logits

    def _head_rows(self, rows: Sequence[int]) -> mx.array:
        """Return the rows that the head computes, padded where the rows of a step are.

        The numbers of prompts that end differ from step to step, and logits are a step's largest
        array.
        """
        size = padded_rows(len(rows)) if self.pads_rows else max(len(rows), 1)
        padded = np.zeros(size, np.int32)
        padded[: len(rows)] = rows
        return mx.array(padded)

    def _source_plan(
        self, sequences: Sequence[ScheduledSequence], num_rows: int | None = None
    ) -> Any:
        """Return the plan of the rows' cross-attention; None without sources."""
        return None if self._sources is None else self._sources.plan(sequences, num_rows)

    def write_sources(
        self, sources: Sequence[SourceTable], layers: Iterable[tuple[mx.array, mx.array]]
    ) -> None:
        """Write the cross-attention KV of an encoder-decoder, see ``SourceRows.write``."""
        assert self._sources is not None, "the model has no encoder"
        self._sources.write(self._pools.layers, sources, layers)

    def _traced(self, token_ids: mx.array, step: PackedStep, states: States) -> mx.array:
        del states
        return self._forward(token_ids, step)

    def _forward(self, token_ids: mx.array, step: PackedStep) -> mx.array:
        caches = [
            PagedLayerCache(pool, window, step)
            for pool, window in zip(self._pools.layers, self._windows, strict=True)
        ]
        with self._seams.during(step):
            return self._model(token_ids[:, None], cache=caches)


def _padded(
    token_ids: mx.array, slots: np.ndarray | None, num_rows: int
) -> tuple[mx.array, np.ndarray | None]:
    """Return tokens and adapter slots, padded to ``num_rows`` with the last row's adapter."""
    missing = num_rows - token_ids.size
    token_ids = mx.concatenate([token_ids, mx.zeros(missing, mx.int32)])
    if slots is not None:
        # If all rows have the same adapter they still do with padding, which takes less time.
        slots = np.append(slots, np.full(missing, slots[-1], slots.dtype))
    return token_ids, slots
