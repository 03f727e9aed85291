"""The interface of attention backends, which own the layout of the KV pool and its attention.

Shapes: T rows (tokens) in a step, H query heads, K key/value heads, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.heads import HeadInputs, HeadSettings
from mlx_parallm.worker.attention.quantisation import KVQuantisation

#: ``BLOCK_LAYOUT``: the form of a block's bytes in all backends: keys, values and, if quantised,
#: the scales of keys and of values, each ``[K, block_size, ...]`` as ``quantise`` returns it.
BLOCK_LAYOUT = "heads-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The KV of one attention layer: K heads of sizes D and V, computed in ``dtype``."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    def bytes_per_token(self, quantisation: KVQuantisation | None) -> int:
        """Return the bytes of a token's KV in this layer."""
        dims = (self.key_dim, self.value_dim)
        if quantisation is None:
            return self.num_kv_heads * sum(dims) * self.dtype.size
        return self.num_kv_heads * sum(quantisation.bytes_of(dim) for dim in dims)


@dataclass(slots=True)
class LayerPool:
    """The KV blocks of one layer.

    Each write replaces the arrays, so callers must keep the pool instead of its arrays.
    """

    keys: mx.array
    values: mx.array

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate for the pool to be up to date."""
        return [self.keys, self.values]


@dataclass(frozen=True, slots=True)
class Scores:
    """Conversion of scores to weights; ``AttentionBackend.attend`` explains the fields."""

    scale: float
    window: int | None = None
    sinks: mx.array | None = None
    soft_cap: float | None = None
    distance_bias: mx.array | None = None


class AttentionBackend(Protocol):
    """Paged attention over pools of one layout."""

    @property
    def name(self) -> str:
        """Return the name that ``mlx_parallm doctor`` reports."""
        ...

    @property
    def block_size(self) -> int:
        """Return the tokens of a block."""
        ...

    @property
    def block_layout(self) -> str:
        """Return the name and version of the form of a block's bytes.

        It changes whenever ``take_blocks`` returns other bytes for equal keys and values: then
        blocks that were taken earlier must not be put.
        """
        ...

    @property
    def runs_ahead(self) -> bool:
        """True if pools may be written while a step in flight holds them."""
        ...

    @property
    def quantisation(self) -> KVQuantisation | None:
        """Return how pools are quantised; None if they keep the model's dtype."""
        ...

    def unquantised(self) -> AttentionBackend:
        """Return a backend like this one with unquantised pools; itself if they are."""
        ...

    def with_own_tables(self) -> Self:
        """Return this backend for further rows of the same steps, in the same pools.

        A backend may keep the block tables of the latest rows, which these would replace.
        """
        ...

    def bytes_per_token(self, shape: LayerShape) -> int:
        """Return the bytes of a token in a pool of this layer."""
        ...

    def new_pool(self, shape: LayerShape, num_blocks: int) -> LayerPool:
        """Return an empty pool of one layer."""
        ...

    def plan(self, sequences: Sequence[ScheduledSequence]) -> Any:
        """Return the index arrays of a step; its rows are the sequences' tokens in order."""
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
        distance_bias: mx.array | None = None,
    ) -> mx.array:
        """Return the attention of each row over its own sequence, up to the row's position.

        Args:
            pool: the layer's pool, with this step's keys and values already written.
            plan: the step's plan.
            queries: ``[T, H, 1, D]``.
            scale: factor of the scores.
            window: a row attends to its latest ``window`` positions, itself included; None: to all.
            sinks: ``[H]`` logits that join the softmax without a value.
            soft_cap: c turns scores s into ``c * tanh(s / c)``, before masks and sinks.
            distance_bias: float32 ``[H, N]``, added to scores after ``scale`` and ``soft_cap``: a
                row at position i gets ``distance_bias[h, min(i - j, N - 1)]`` for the key at j.
                Layers of a step that pass the same array share what is computed from it.

        Returns:
            ``[T, H, 1, V]``.
        """
        ...

    def gather(self, pool: LayerPool, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys ``[B, K, S, D]`` and values ``[B, K, S, V]`` of block tables.

        Modules that cannot use ``attend`` use it, and see an ordinary dense cache.

        Args:
            pool: the layer's pool.
            table: block ids, int32 ``[B, S / block_size]``.
        """
        ...

    def copy_blocks(self, pool: LayerPool, sources: mx.array, targets: mx.array) -> None:
        """Copy whole blocks within a pool."""
        ...

    def take_blocks(self, pool: LayerPool, blocks: mx.array) -> mx.array:
        """Return what whole blocks hold, uint8 ``[n, bytes]``, in the form of ``block_layout``.

        A row has all arrays of the pool, their scales included. It is read after the writes that
        were asked for before, and before those that are asked for later.

        Args:
            pool: the layer's pool.
            blocks: their ids, int32 ``[n]``, at least one.
        """
        ...

    def put_blocks(self, pool: LayerPool, blocks: mx.array, contents: mx.array) -> None:
        """Make whole blocks hold, bit for bit, what ``take_blocks`` returned.

        Args:
            pool: the layer's pool.
            blocks: their ids, int32 ``[n]``, at least one; none occurs twice.
            contents: uint8 ``[n, bytes]``, of a pool of an equal layer, ``block_layout`` and
                quantisation, with blocks of equal size.
        """
        ...

    def forget_writes(self, pool: LayerPool) -> None:
        """Drop the pending writes of a failed step; nothing may be in flight.

        Otherwise every later step would try to compute them again.
        """
        ...


@runtime_checkable
class HeadMaker(AttentionBackend, Protocol):
    """A backend that makes heads of a layer's products, and writes keys and values, in one go."""

    def makes_heads(self, pool: LayerPool, dtype: mx.Dtype) -> bool:
        """True if it makes heads for this pool of products of this dtype."""
        ...

    def make_heads(
        self, pool: LayerPool, plan: Any, settings: HeadSettings, inputs: HeadInputs
    ) -> mx.array:
        """Write a step's keys and values into the pool; return its queries, ``[T, H, 1, D]``."""
        ...


@runtime_checkable
class CompilableAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be calls of one compiled function.

    The function's arguments are the plan's arrays, which each step makes anew, and the arrays that
    order the writes to each pool. The pools themselves are constants of the function.
    """

    @property
    def pads_rows(self) -> bool:
        """True if steps with prompts are faster when their row counts are rounded to buckets."""
        ...

    def padded_plan(self, sequences: Sequence[ScheduledSequence], num_rows: int) -> Any:
        """Return a plan with ``num_rows`` rows, padded after those of the sequences.

        Padding rows are not written, and their attention is undefined.
        """
        ...

    def decode_kinds(self, plan: Any) -> Any:
        """Return what layers asked of a plan of decode rows; it is equal in every such step."""
        ...

    def decode_arrays(
        self, sequences: Sequence[ScheduledSequence], positions: np.ndarray, kinds: Any
    ) -> list[np.ndarray]:
        """Return the arrays of a step in which each sequence decodes one token, int32.

        ``decode_plan`` gets them as MLX's.

        Args:
            sequences: sequences with one token each.
            positions: positions of the forward's rows, int32; rows after the last sequence are
                padding at position 0.
            kinds: the ``decode_kinds`` of an earlier step.
        """
        ...

    def decode_plan(self, arrays: Sequence[mx.array], kinds: Any) -> Any:
        """Return a plan made of such arrays, or of their placeholders during compilation."""
        ...

    def decode_tables(self, plan: Any) -> mx.array:
        """Return the block tables of a plan's rows, int32 ``[T, M]``; 0 after the last block."""
        ...

    def chain(self, pool: LayerPool) -> list[mx.array]:
        """Return the arrays of a pool that a write replaces; the next reader depends on them."""
        ...

    def set_chain(self, pool: LayerPool, arrays: Sequence[mx.array]) -> None:
        """Replace the arrays that ``chain`` returns."""
        ...

    @property
    def runs_in_order(self) -> bool:
        """True if what one evaluation submits runs after all that was submitted before it."""
        ...

    def settle(self, pool: LayerPool) -> None:
        """Let later steps depend on no write before: all come first by ``runs_in_order``."""
        ...
