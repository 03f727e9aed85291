"""The path of last resort: each sequence by itself, with the model's own caches.

It is right for every model that mlx_lm runs, and sequences still join and leave between steps. But
nothing is computed in batches, and prefixes are not reused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from typing_extensions import override

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import AdapterRows


class AlonePath(ForwardPath):
    """Runs sequences one at a time on stock caches, kept by slot."""

    name = "alone"
    keeps_states = False
    selects_rows = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: dict[int, list[Any]] = {}
        self._touched: list[int] = []
        self.adapters = AdapterContext()

    @property
    @override
    def is_compiled(self) -> bool:
        return False

    @property
    @override
    def builds_beside(self) -> bool:
        return False

    def begin_step(self) -> None:
        """Do nothing: there is nothing to keep by step."""

    def before_traces(self, join: Callable[[], None]) -> None:
        """Do nothing: no step is traced."""

    def settle_writes(self) -> None:
        """Do nothing: writes are ordered by the caches that they change."""

    @property
    @override
    def has_state(self) -> bool:
        return True

    @override
    def logits(
        self, sequences: Sequence[ScheduledSequence], token_ids: mx.array, rows: Sequence[int]
    ) -> mx.array:
        self._touched = [sequence.slot for sequence in sequences]
        firsts = np.cumsum([0, *(len(sequence.token_ids) for sequence in sequences)]).tolist()
        logit_rows = np.array(rows, dtype=np.int64)
        parts = []
        for sequence, (first, last) in zip(sequences, pairwise(firsts), strict=True):
            if sequence.start == 0:
                self._caches[sequence.slot] = make_prompt_cache(self._model)
            adapter_rows = (
                AdapterRows(mx.array([sequence.adapter_slot])) if sequence.adapter_slot else None
            )
            with self.adapters.during(adapter_rows):
                output = self._model(token_ids[first:last][None], cache=self._caches[sequence.slot])
            places = logit_rows[(logit_rows >= first) & (logit_rows < last)] - first
            if len(places):
                parts.append(output[0, mx.array(places.astype(np.int32))])
        return mx.concatenate(parts, axis=0) if parts else mx.zeros((0, 0))

    @override
    def arrays(self) -> list[mx.array]:
        states = [cache.state for slot in self._touched for cache in self._caches[slot]]
        return [array for _, array in tree_flatten(states) if isinstance(array, mx.array)]

    def forget_writes(self) -> None:
        """Do nothing: no pool is shared with later steps."""

    def forget_weights(self) -> None:
        """Do nothing: every step reads the model's current weights."""

    @override
    def release_kv(self) -> None:
        self._caches.clear()
        self._touched.clear()

    def restore_kv(self, num_blocks: int | None = None) -> None:
        """Do nothing: caches are made when their sequences begin."""

    @property
    @override
    def pools(self) -> None:
        return None

    @property
    @override
    def states(self) -> None:
        return None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the KV is in the caches of the slots."""
        del pairs

    @override
    def copy_state(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._caches[target] = copy.deepcopy(self._caches[source])

    def capture_state(self, pairs: Sequence[tuple[int, int]]) -> dict[int, mx.array]:
        """Return nothing: no snapshot is made where states have no slots."""
        assert not pairs, "the state cannot be copied by slot"
        return {}
