"""The last resort: each sequence with the model's own caches, one after the other.

Right for whatever mlx_lm runs, in the same continuous batch, but without batched compute and
without prefix reuse.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import AdapterRows


class AlonePath:
    """Runs sequences one at a time on stock caches, kept by slot. Implements ``ForwardPath``."""

    name = "alone"
    is_compiled = False
    has_state = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: dict[int, list[Any]] = {}
        self._touched: list[int] = []
        self.adapters = AdapterContext()

    def logits(
        self, sequences: Sequence[ScheduledSequence], token_ids: mx.array, rows: Sequence[int]
    ) -> mx.array:
        """See ``ForwardPath.logits``."""
        self._touched = [one.slot for one in sequences]
        firsts = np.cumsum([0, *(len(one.token_ids) for one in sequences)]).tolist()
        wanted = np.array(rows, dtype=np.int64)
        parts = []
        for one, (first, last) in zip(sequences, pairwise(firsts), strict=True):
            if one.start == 0:
                self._caches[one.slot] = make_prompt_cache(self._model)
            mine = AdapterRows(mx.array([one.adapter_slot])) if one.adapter_slot else None
            with self.adapters.during(mine):
                output = self._model(token_ids[first:last][None], cache=self._caches[one.slot])
            places = wanted[(wanted >= first) & (wanted < last)] - first
            if len(places):
                parts.append(output[0, mx.array(places.astype(np.int32))])
        return mx.concatenate(parts, axis=0) if parts else mx.zeros((0, 0))

    def arrays(self) -> list[mx.array]:
        """See ``ForwardPath.arrays``."""
        states = [cache.state for slot in self._touched for cache in self._caches[slot]]
        return [array for _, array in tree_flatten(states) if isinstance(array, mx.array)]

    def forget_writes(self) -> None:
        """Nothing: every step's cache is its own."""

    def forget_weights(self) -> None:
        """Nothing: every step reads the model's own."""

    def release_kv(self) -> None:
        """See ``ForwardPath.release_kv``."""
        self._caches.clear()
        self._touched.clear()

    def restore_kv(self) -> None:
        """Nothing: caches are made with their sequences."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing: the KV is in the caches of the slots."""
        del pairs

    def copy_state(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``ForwardPath.copy_state``."""
        for source, target in pairs:
            self._caches[target] = copy.deepcopy(self._caches[source])
