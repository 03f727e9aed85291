"""The changes of all resident adapters to one module, in tensors stacked by slot.

Each row of a batch has a slot, and ``mx.gather_mm`` multiplies it by the matrices of that slot. For
an adapter that many rows have, all rows are multiplied at once. Slot 0 stands for no adapter and
has zeros. Smaller ranks are padded to the largest with zeros, which change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx
from typing_extensions import override

from mlx_parallm.adapters.arrays import all_to_mlx, to_mlx
from mlx_parallm.adapters.weights import Kind, LowRank
from mlx_parallm.worker.lora.rows import AdapterRows, FrequentAdapters

# A stack's rank is a multiple of RANK_STEP, so that few adapters make the stack grow.
RANK_STEP = 8


class AdapterStack:
    """The low-rank changes of one module.

    Attributes:
        kind: the kind of the module.
        a: the first factors; the slot is on ``slot_axis`` and the rank on ``rank_axis``.
        b: the second factors ``[..., r, out]``, with the slot on ``slot_axis``. They contain the
            adapters' scales.
        gain: the factors by which DoRA multiplies the rows of the weight, float32 ``[slots, out]``
            or ``[slots, vocab]``; None while no adapter is a DoRA.
    """

    kind: ClassVar[Kind]
    slot_axis: ClassVar[int] = 0
    rank_axis: ClassVar[int] = -2

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Begin with slot 0 alone.

        Args:
            shape: the shape of the module's weight, as if unpacked.
            dtype: the dtype in which products are computed.
        """
        self._dtype = dtype
        self._shape = shape
        a, b = (tuple(factor) for factor in self._factor_shapes(RANK_STEP))
        self.a = mx.expand_dims(mx.zeros(self._turned_shape(a), dtype), self.slot_axis)
        self.b = mx.expand_dims(mx.zeros((*b[:-2], b[-1], b[-2]), dtype), self.slot_axis)
        self.gain: mx.array | None = None

    def _factor_shapes(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shapes of ``a`` and ``b`` of a ``LowRank`` that fits the module."""
        *outer, out, inner = self._shape
        return (*outer, rank, inner), (*outer, out, rank)

    def _turned_shape(self, a: tuple[int, ...]) -> tuple[int, ...]:
        return a if self.rank_axis == -2 else (*a[:-2], a[-1], a[-2])

    @property
    def num_slots(self) -> int:
        """The number of slots that there is room for, slot 0 included."""
        return self.a.shape[self.slot_axis]

    @property
    def num_bytes(self) -> int:
        """The size of the stacked arrays, in bytes."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Return the stacked arrays, by which rows are multiplied."""
        return [self.a, self.b, *([] if self.gain is None else [self.gain])]

    def set_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Replace the stacked arrays by others of the same shapes."""
        self.a, self.b, *gain = arrays
        self.gain = gain[0] if gain else None

    def why_unfit(self, change: LowRank) -> str | None:
        """Return why a change does not fit the module; None if it does."""
        if change.kind != self.kind:
            return f"it changes a module of kind {change.kind}, and this one is {self.kind}"
        a, b = self._factor_shapes(change.rank)
        if change.a.shape != tuple(a) or change.b.shape != tuple(b):
            return f"its tensors are {change.a.shape} and {change.b.shape}, not {a} and {b}"
        return None

    def put(
        self,
        slot: int,
        change: LowRank,
        gain: mx.array | None = None,
        factors: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        """Put a change into a slot.

        Nothing is computed before the arrays are evaluated. They are then written in place, or
        copied if a step in flight still reads the old ones.

        Args:
            slot: the slot, from 1 on.
            change: a change that fits the module.
            gain: the result of ``dora_gain`` for the change.
            factors: the result of ``factors_of`` for the change; None to compute it.
        """
        self.reserve(slot + 1)
        self._widen(change.rank)
        a, b = factors or factors_of([change], self._dtype)[0]
        missing = self.b.shape[-2] - change.rank
        a = a if self.rank_axis == -2 else a.swapaxes(-1, -2)
        self.a[self._at(slot)] = _longer(a, self.rank_axis, missing)
        self.b[self._at(slot)] = _longer(b.swapaxes(-1, -2), -2, missing)
        self.set_gain(slot, gain)

    def set_gain(self, slot: int, gain: mx.array | None) -> None:
        """Set DoRA's gain of a slot; None for a LoRA."""
        if gain is not None and self.gain is None:
            self.gain = mx.ones((self.num_slots, self._shape[-2]))
        if self.gain is not None:
            self.gain[slot] = 1 if gain is None else gain

    def drop(self, slot: int) -> None:
        """Remove the change from a slot."""
        self.a[self._at(slot)] = 0
        self.b[self._at(slot)] = 0
        self.set_gain(slot, None)

    def reserve(self, num_slots: int) -> None:
        """Make room for so many slots, by doubling; rows may only have slots below that number."""
        more = capacity(num_slots) - self.num_slots
        if more <= 0:
            return
        self.a = _longer(self.a, self.slot_axis, more)
        self.b = _longer(self.b, self.slot_axis, more)
        if self.gain is not None:
            self.gain = mx.pad(self.gain, [(0, more), (0, 0)], constant_values=1.0)

    def _widen(self, rank: int) -> None:
        """Make room for this rank."""
        more = -(-rank // RANK_STEP) * RANK_STEP - self.b.shape[-2]
        if more > 0:
            self.a = _longer(self.a, self.rank_axis, more)
            self.b = _longer(self.b, -2, more)

    def _at(self, slot: int) -> tuple[slice | int, ...]:
        return (*[slice(None)] * self.slot_axis, slot)


class LinearStack(AdapterStack):
    """The changes of a linear layer: ``a`` is ``[slots, r, in]``, ``b`` ``[slots, r, out]``."""

    kind = "linear"

    def __call__(
        self, x: mx.array, y: mx.array, rows: AdapterRows, bias: mx.array | None = None
    ) -> mx.array:
        """Return the layer's output ``y``, changed for each row.

        Args:
            x: the layer's input, ``[B, L, in]``; its first axes may be merged or split, as in
                packed rows ``[1, B * L, in]``.
            y: the layer's output, ``[B, L, out]``, with the same first axes as x.
            rows: the adapters of the B rows.
            bias: the bias that y contains, ``[out]``, because DoRA does not scale it.
        """
        if rows.common_slot is not None:
            return self._by_common_slot(x, y, rows.common_slot, bias)
        if x.ndim != 3 or x.shape[0] != rows.slots.size:
            shape, count = y.shape, rows.slots.size
            x, y = (array.reshape(count, -1, array.shape[-1]) for array in (x, y))
            return self(x, y, rows, bias).reshape(shape)
        x = x.astype(self._dtype)
        if rows.frequent is None:
            change = self._by_own_slots(x, rows.slots).astype(y.dtype)
        else:
            change = self._by_frequent(x, rows.frequent).astype(y.dtype)
        return self.scaled(y + change, rows.slots, bias)

    def _by_common_slot(
        self, x: mx.array, y: mx.array, slot: int, bias: mx.array | None
    ) -> mx.array:
        """Return an output ``[..., out]`` of an input ``[..., in]``, changed by one adapter."""
        y = y + (x.astype(self._dtype) @ self.a[slot].T @ self.b[slot]).astype(y.dtype)
        if self.gain is None:
            return y
        gain = self.gain[slot].astype(y.dtype)
        return y * gain if bias is None else (y - bias) * gain + bias

    def scaled(self, y: mx.array, slots: mx.array, bias: mx.array | None = None) -> mx.array:
        """Return changed outputs, scaled by the DoRA gains of the rows' slots.

        Args:
            y: outputs ``[B, L, out]`` with the low-rank changes added.
            slots: the slots of the rows, int32 ``[B]``.
            bias: the bias that y contains, ``[out]``, because DoRA does not scale it.
        """
        if self.gain is None:
            return y
        gain = self.gain[slots][:, None].astype(y.dtype)
        return y * gain if bias is None else (y - bias) * gain + bias

    def _by_own_slots(self, x: mx.array, slots: mx.array) -> mx.array:
        """Return the changes ``[B, L, out]``, with each row multiplied by its own adapter."""
        low = mx.gather_mm(x, self.a.swapaxes(-1, -2), rhs_indices=slots)
        return mx.gather_mm(low, self.b, rhs_indices=slots)

    def _by_frequent(self, x: mx.array, frequent: FrequentAdapters) -> mx.array:
        """Return the changes ``[B, L, out]``, with all rows multiplied by each frequent adapter.

        A row keeps only the product of its own adapter.
        """
        a, b = self.a[frequent.slots], self.b[frequent.slots]
        low = x @ a.flatten(0, 1).T
        if frequent.has_adapter is not None:
            low = mx.where(frequent.has_adapter, low.reshape(*x.shape[:2], *a.shape[:2]), 0)
            low = low.flatten(2)
        change = low @ b.flatten(0, 1)
        if frequent.rest is None or frequent.rest_slots is None:
            return change
        rest = self._by_own_slots(x[frequent.rest], frequent.rest_slots)
        return change.at[frequent.rest].add(rest)


class EmbeddingStack(AdapterStack):
    """The changes of an embedding: ``a`` is ``[slots, vocab, r]``, ``b`` ``[slots, r, dims]``.

    Attributes:
        heads: True where a slot changes the tied head too, bool ``[slots]``.
    """

    kind = "embedding"
    rank_axis = -1

    @override
    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        super().__init__(shape, dtype)
        self.heads = mx.zeros(1, mx.bool_)

    @override
    def arrays(self) -> list[mx.array]:
        return [self.heads, *super().arrays()]

    @override
    def set_arrays(self, arrays: Sequence[mx.array]) -> None:
        self.heads = arrays[0]
        super().set_arrays(arrays[1:])

    @override
    def put(
        self,
        slot: int,
        change: LowRank,
        gain: mx.array | None = None,
        factors: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        super().put(slot, change, gain, factors)
        self.heads[slot] = change.changes_head

    @override
    def reserve(self, num_slots: int) -> None:
        super().reserve(num_slots)
        self.heads = _longer(self.heads, 0, self.num_slots - self.heads.size)

    def _factor_shapes(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        vocab, dims = self._shape
        return (rank, vocab), (dims, rank)

    def __call__(self, ids: mx.array, y: mx.array, rows: AdapterRows) -> mx.array:
        """Return ``y``, the embeddings ``[B, L, dims]`` of ids ``[B, L]``, changed for each row.

        The first axes may be merged or split.
        """
        if rows.common_slot is not None:
            return self._by_common_slot(ids, y, rows.common_slot)
        slots = rows.slots
        if ids.ndim != 2 or ids.shape[0] != slots.size:
            shape, count = y.shape, slots.size
            split = ids.reshape(count, -1), y.reshape(count, -1, shape[-1])
            return self(*split, rows).reshape(shape)
        low = self.a[slots[:, None], ids]
        y = y + mx.gather_mm(low, self.b, rhs_indices=slots).astype(y.dtype)
        if self.gain is None:
            return y
        return y * self.gain[slots[:, None], ids][..., None].astype(y.dtype)

    def _by_common_slot(self, ids: mx.array, y: mx.array, slot: int) -> mx.array:
        """Return ``y``, the embeddings of ids of any shape, changed by one adapter."""
        y = y + (self.a[slot][ids] @ self.b[slot]).astype(y.dtype)
        return y if self.gain is None else y * self.gain[slot][ids][..., None].astype(y.dtype)

    def head(self, x: mx.array, y: mx.array, rows: AdapterRows) -> mx.array:
        """Return ``y``, the logits ``[B, L, vocab]`` of a tied head, changed for each row.

        ``x`` is the head's input, hidden states ``[B, L, dims]``.
        """
        if rows.common_slot is not None:
            return self._head_by_common_slot(x, y, rows.common_slot)
        slots = rows.slots
        is_changed = self.heads[slots][:, None, None]
        low = mx.gather_mm(x.astype(self._dtype), self.b.swapaxes(-1, -2), rhs_indices=slots)
        low = mx.where(is_changed, low, 0)
        y = y + mx.gather_mm(low, self.a.swapaxes(-1, -2), rhs_indices=slots).astype(y.dtype)
        if self.gain is None:
            return y
        return y * mx.where(is_changed, self.gain[slots][:, None], 1).astype(y.dtype)

    def _head_by_common_slot(self, x: mx.array, y: mx.array, slot: int) -> mx.array:
        """Return ``y``, the logits for hidden states of any shape, changed by one adapter."""
        is_changed = self.heads[slot]
        low = mx.where(is_changed, x.astype(self._dtype) @ self.b[slot].T, 0)
        y = y + (low @ self.a[slot].T).astype(y.dtype)
        if self.gain is None:
            return y
        return y * mx.where(is_changed, self.gain[slot], 1).astype(y.dtype)


class ExpertStack(AdapterStack):
    """The changes of experts.

    ``a`` is ``[experts, slots, r, in]`` and ``b`` ``[experts, slots, r, out]``. So expert and slot
    can be one index that sorts as the experts do: see ``expert_slots``.
    """

    kind = "experts"
    slot_axis = 1

    def __call__(
        self, x: mx.array, y: mx.array, both: mx.array, *, sorted_indices: bool
    ) -> mx.array:
        """Return the outputs of the experts that rows chose, changed for each row.

        Args:
            x: the experts' inputs ``[..., 1, in]``; the first axes broadcast with ``both``.
            y: the experts' outputs ``[..., 1, out]``.
            both: expert and slot as one index, from ``expert_slots``, ``[...]``.
            sorted_indices: True if ``both`` is in ascending order.
        """
        a, b = (array.flatten(0, 1) for array in (self.a, self.b))
        low = mx.gather_mm(
            x.astype(self._dtype),
            a.swapaxes(-1, -2),
            rhs_indices=both,
            sorted_indices=sorted_indices,
        )
        change = mx.gather_mm(low, b, rhs_indices=both, sorted_indices=sorted_indices)
        return y + change.astype(y.dtype)


STACKS: dict[Kind, type[AdapterStack]] = {
    stack.kind: stack for stack in (LinearStack, EmbeddingStack, ExpertStack)
}


def capacity(num_slots: int) -> int:
    """Return a stack's number of slots if it needs ``num_slots``: slot 0 and a power of two."""
    return 1 if num_slots <= 1 else 1 + (1 << (num_slots - 2).bit_length())


def expert_slots(indices: mx.array, slots: mx.array, num_slots: int) -> mx.array:
    """Return expert and slot as one index ``[..., k]``, which sorts as the experts do.

    Args:
        indices: the experts that tokens chose, ``[..., k]``.
        slots: the slots of the rows, int32 ``[B]``; all rows have the same number of tokens.
        num_slots: the number of slots in the stacks.
    """
    tokens = indices.size // indices.shape[-1]
    each = mx.repeat(slots, tokens // slots.size).reshape(*indices.shape[:-1], 1)
    return indices * num_slots + each.astype(indices.dtype)


def factors_of(changes: Sequence[LowRank], dtype: mx.Dtype) -> list[tuple[mx.array, mx.array]]:
    """Return ``a`` and ``scale * b`` of each change, in the dtype of products."""
    firsts = all_to_mlx([change.a for change in changes], dtype)
    scales = [change.scale for change in changes]
    seconds = all_to_mlx([change.b for change in changes], dtype, scales)
    return list(zip(firsts, seconds, strict=True))


def dora_norms(weight: mx.array, change: LowRank) -> mx.array:
    """Return the norm of each row of a changed weight, float32.

    Args:
        weight: the module's weight, unpacked, ``[out, in]`` or ``[vocab, dims]``.
        change: the change of the weight.
    """
    a, b = all_to_mlx([change.a, change.b], mx.float32)
    delta = change.scale * ((b @ a).T if change.kind == "embedding" else b @ a)
    return mx.linalg.norm(weight.astype(mx.float32) + delta, axis=1)


def dora_gain(change: LowRank, norms: mx.array) -> mx.array:
    """Return the factor by which DoRA multiplies each row of the changed weight, float32.

    Args:
        change: the change of the weight, with a magnitude.
        norms: the result of ``dora_norms`` for the whole weight.
    """
    assert change.magnitude is not None, "a LoRA has no gain"
    return to_mlx(change.magnitude).astype(mx.float32) / norms


def _longer(array: mx.array, axis: int, more: int) -> mx.array:
    """Return the array with ``more`` zeros appended along an axis."""
    if not more:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return mx.pad(array, widths)
