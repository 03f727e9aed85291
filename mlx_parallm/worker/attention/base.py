"""What an attention backend is: it owns the layout of the KV pool and everything that touches it.

Shapes: T rows (tokens) in a step, H query heads, K key/value heads, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.quantisation import KVQuantisation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One attention layer's KV: K heads of sizes D and V, computed in ``dtype``."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    def bytes_per_token(self, quantisation: KVQuantisation | None) -> int:
        """KV bytes of one token in this layer."""
        dims = (self.key_dim, self.value_dim)
        if quantisation is None:
            return self.num_kv_heads * sum(dims) * self.dtype.size
        return self.num_kv_heads * sum(quantisation.bytes_of(dim) for dim in dims)


@dataclass(slots=True)
class LayerPool:
    """One layer's KV blocks. The arrays are replaced by every write: hold the pool, not them."""

    keys: mx.array
    values: mx.array

    def arrays(self) -> list[mx.array]:
        """What must be evaluated for the pool to be up to date."""
        return [self.keys, self.values]


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become weights; see ``AttentionBackend.attend``."""

    scale: float
    window: int | None = None
    sinks: mx.array | None = None
    soft_cap: float | None = None


class AttentionBackend(Protocol):
    """Paged attention over pools of one layout."""

    @property
    def name(self) -> str:
        """As reported by ``mlx_parallm doctor``."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether pools may be written while a step in flight holds them."""
        ...

    @property
    def quantisation(self) -> KVQuantisation | None:
        """How pools keep fewer bits; None if keys and values are kept as they are."""
        ...

    def unquantised(self) -> AttentionBackend:
        """A backend of this kind that keeps keys and values as they are; itself if it does."""
        ...

    def bytes_per_token(self, shape: LayerShape) -> int:
        """Bytes of one token in a pool of this layer."""
        ...

    def new_pool(self, shape: LayerShape, num_blocks: int) -> LayerPool:
        """An empty pool of one layer."""
        ...

    def plan(self, sequences: Sequence[ScheduledSequence]) -> Any:
        """Index arrays for all layers of a step; its rows are the sequences' tokens in order."""
        ...

    def write(self, pool: LayerPool, plan: Any, keys: mx.array, values: mx.array) -> None:
        """Write a step's keys ``[T, K, 1, D]`` and values ``[T, K, 1, V]`` into the pool."""
        ...

    def attend(
        self,
        pool: LayerPool,
        plan: Any,
        queries: mx.array,
        *,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Attention of queries ``[T, H, 1, D]`` over each row's own sequence up to its position.

        Args:
            pool: already holds this step's keys and values.
            plan: of this step.
            queries: ``[T, H, 1, D]``.
            scale: of the scores.
            window: a row sees its ``window`` latest positions only, itself included.
            sinks: ``[H]`` logits that join the softmax without a value.
            soft_cap: c makes scores s ``c * tanh(s / c)``, before masks and sinks.

        Returns:
            ``[T, H, 1, V]``.
        """
        ...

    def gather(self, pool: LayerPool, table: mx.array) -> tuple[mx.array, mx.array]:
        """Keys ``[B, K, S, D]`` and values ``[B, K, S, V]`` by block table, S positions long.

        The table is int32 ``[B, S / block_size]``. For modules that cannot use ``attend``: they see
        an ordinary dense cache.
        """
        ...

    def copy_blocks(self, pool: LayerPool, sources: mx.array, targets: mx.array) -> None:
        """Copy whole blocks within a pool."""
        ...

    def forget_writes(self, pool: LayerPool) -> None:
        """Depend no more on writes that could not be computed; nothing may be in flight.

        They would otherwise be tried again by every step after the one that failed.
        """
        ...


@runtime_checkable
class CompilableAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be calls of one compiled function.

    That function's arguments are the plan's arrays, made anew each step, and what orders the writes
    to each pool; the pools themselves are constants in it.
    """

    @property
    def pads_rows(self) -> bool:
        """Whether steps with prompts are faster with few numbers of rows."""
        ...

    def padded_plan(self, sequences: Sequence[ScheduledSequence], num_rows: int) -> Any:
        """A ``plan`` with rows behind those of the sequences, ``num_rows`` in all.

        They are written nowhere, and what attention gives for them is of no use.
        """
        ...

    def decode_kinds(self, plan: Any) -> Any:
        """What the layers asked of a plan of decode rows: the same in every such step."""
        ...

    def decode_arrays(
        self, sequences: Sequence[ScheduledSequence], positions: np.ndarray, kinds: Any
    ) -> list[mx.array]:
        """Arrays of a step in which each sequence decodes one token.

        Args:
            sequences: one token each.
            positions: of the rows that the forward has, int32; those from the last sequence on are
                padding, at 0.
            kinds: of an earlier step.
        """
        ...

    def decode_plan(self, arrays: Sequence[mx.array], kinds: Any) -> Any:
        """A plan of such arrays, or of what stands for them while a function is compiled."""
        ...

    def decode_tables(self, plan: Any) -> mx.array:
        """Block tables of the rows of such a plan, int32 ``[T, M]``; 0 behind the last block."""
        ...

    def chain(self, pool: LayerPool) -> list[mx.array]:
        """The arrays of a pool that a write replaces: what the next reader depends on."""
        ...

    def set_chain(self, pool: LayerPool, arrays: Sequence[mx.array]) -> None:
        """Put other arrays in their place."""
        ...
