"""A packed forward in which some modules run group by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.adapters.context import AdapterContext
from mlx_parallm.adapters.rows import AdapterRows
from mlx_parallm.attention.base import AttentionBackend
from mlx_parallm.batch import ScheduledSequence
from mlx_parallm.runner.group_cache import CacheViews
from mlx_parallm.runner.kv_pools import KVPools
from mlx_parallm.runner.module_split import ModuleSplit, SplitStep
from mlx_parallm.runner.paged_cache import PackedStep
from mlx_parallm.runner.paths.base import adapter_slots
from mlx_parallm.runner.row_groups import make_groups
from mlx_parallm.runner.row_selection import RowSelector
from mlx_parallm.runner.seam import ModelSeams


class SplitPath:
    """Norms, MLP, experts and head take one row per token; ``modules`` take groups.

    Decode rows are one group, so that a step stays one forward however many sequences decode; with
    ``batch_decode`` false each is its own, for modules that cannot be batched. Implements
    ``ForwardPath``.
    """

    name = "split"
    is_compiled = False

    def __init__(
        self,
        model: Any,
        views: CacheViews,
        pools: KVPools,
        backend: AttentionBackend,
        selector: RowSelector,
        modules: Sequence[nn.Module],
        block_size: int,
        *,
        batch_decode: bool,
    ) -> None:
        self._model = model
        self._views = views
        self._pools = pools
        self._backend = backend
        self._selector = selector
        self._block_size = block_size
        self._batch_decode = batch_decode
        self._seams = ModelSeams(model)
        self.adapters = AdapterContext()
        self._split = ModuleSplit(modules)

    @property
    def has_state(self) -> bool:
        """Whether sequences keep anything besides their KV blocks."""
        return bool(self._views.stores)

    def close(self) -> None:
        """Leave the model as it was."""
        self._split.remove()

    def logits(
        self, sequences: Sequence[ScheduledSequence], token_ids: mx.array, rows: Sequence[int]
    ) -> mx.array:
        """See ``ForwardPath.logits``."""
        step = PackedStep.of(self._backend, sequences)
        groups = make_groups(
            sequences, self._backend, self._block_size, batch_decode=self._batch_decode
        )
        splitting = SplitStep(self._views, groups, step.positions, self.adapters)
        wanted = mx.array(np.array(rows, dtype=np.int32)) if rows else mx.array([0])
        mine = AdapterRows.of_step(adapter_slots(sequences))
        with (
            self._seams.during(step),
            self._split.during(splitting),
            self.adapters.during(mine, wanted),
        ):
            return self._selector.run(
                lambda: self._model(token_ids[:, None], cache=self._views.packed(step)),
                wanted,
            )

    def arrays(self) -> list[mx.array]:
        """See ``ForwardPath.arrays``."""
        written = [array for store in self._views.stores for array in store.take_written()]
        return self._pools.arrays() + written

    def forget_writes(self) -> None:
        """See ``ForwardPath.forget_writes``."""
        self._pools.forget_writes()

    def forget_weights(self) -> None:
        """Nothing: every step reads the model's own."""

    def release_kv(self) -> None:
        """See ``ForwardPath.release_kv``."""
        self._pools.release()
        self._views.forget_states()

    def restore_kv(self) -> None:
        """See ``ForwardPath.restore_kv``."""
        self._pools.restore()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``ForwardPath.copy_blocks``."""
        self._pools.copy_blocks(pairs)

    def copy_state(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``ForwardPath.copy_state``."""
        for source, target in pairs:
            for store in self._views.stores:
                store.copy(source, target)
