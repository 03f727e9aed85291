"""The path that runs the whole model once per sequence, on the KV pool and the state slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.generation.group_cache import CacheViews
from mlx_parallm.worker.generation.paged_cache import KVPools, PackedStep
from mlx_parallm.worker.generation.paths.base import PooledPath
from mlx_parallm.worker.generation.row_groups import make_groups
from mlx_parallm.worker.generation.state_store import GroupStateCache, KeptStates


class SequentialPath(PooledPath):
    """The path of models that cannot run several sequences at once. Implements ``ForwardPath``."""

    name = "sequential"
    selects_rows = False

    def __init__(
        self,
        model: Any,
        views: CacheViews,
        pools: KVPools,
        backend: AttentionBackend,
        block_size: int,
    ) -> None:
        super().__init__(pools, views.states)
        self._model = model
        self._views = views
        self._backend = backend
        self._block_size = block_size

    @override
    def logits(
        self, sequences: Sequence[ScheduledSequence], token_ids: mx.array, rows: Sequence[int]
    ) -> mx.array:
        groups = make_groups(sequences, self._backend, self._block_size, batch_decode=False)
        packed = self._views.packed(PackedStep.of(self._backend, sequences))
        logit_rows = np.array(rows, dtype=np.int32)
        parts = []
        for group in groups:
            states, state_caches = self._views.begin(group), dict[int, GroupStateCache]()
            kept = KeptStates(states, 1)
            caches = [self._views.grouped(cache, group, states, state_caches) for cache in packed]
            tokens = token_ids[int(group.rows[0]) : int(group.rows[-1]) + 1][None]
            with self.adapters.during(group.adapter_rows):
                logits = self._model(tokens, cache=caches)
            for cache in state_caches.values():
                cache.commit()
            self._states.commit(group.slots, states)
            self._states.keep(group.sequences, kept)
            own_rows = logit_rows[(logit_rows >= group.rows[0]) & (logit_rows <= group.rows[-1])]
            if len(own_rows):
                parts.append(logits[0, mx.array(own_rows - np.int32(group.rows[0]))])
        return mx.concatenate(parts, axis=0) if parts else mx.zeros((0, 0))
