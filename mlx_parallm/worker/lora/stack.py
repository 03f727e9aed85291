"""What all resident adapters change of one module, stacked by slot.

Rows of a batch name their slots, and ``mx.gather_mm`` multiplies each row by its own adapter's
matrices; those of an adapter that many rows have are multiplied at once. Slot 0 is no adapter:
zeros. Ranks are padded to the largest by zeros, which change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from mlx_parallm.adapters.tensors import to_mlx
from mlx_parallm.adapters.weights import Kind, LowRank
from mlx_parallm.worker.lora.rows import AdapterRows, Crowd

# Ranks grow by multiples of this, so that few adapters make the stack anew.
RANK_STEP = 8


class AdapterStack:
    """The low-rank changes of one module.

    Attributes:
        kind: of the module.
        a: the first factors, the slot on ``slot_axis`` and the rank on ``rank_axis``.
        b: the second factors ``[..., r, out]``, likewise, with the scales in them.
        gain: float32: DoRA's factor of each row of the weight, by slot; None while no adapter is
            one.
    """

    kind: ClassVar[Kind]
    slot_axis: ClassVar[int] = 0
    rank_axis: ClassVar[int] = -2

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Nothing but slot 0.

        Args:
            shape: of the module's weight, unpacked.
            dtype: that products are computed in.
        """
        self._dtype = dtype
        self._shape = shape
        a, b = (tuple(one) for one in self._fitting(RANK_STEP))
        self.a = mx.expand_dims(mx.zeros(self._turned_shape(a), dtype), self.slot_axis)
        self.b = mx.expand_dims(mx.zeros((*b[:-2], b[-1], b[-2]), dtype), self.slot_axis)
        self.gain: mx.array | None = None

    def _fitting(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """Shapes of a ``LowRank`` that changes a weight ``[..., out, in]``."""
        *outer, out, inner = self._shape
        return (*outer, rank, inner), (*outer, out, rank)

    def _turned_shape(self, a: tuple[int, ...]) -> tuple[int, ...]:
        return a if self.rank_axis == -2 else (*a[:-2], a[-1], a[-2])

    @property
    def num_slots(self) -> int:
        """Slots there is room for, slot 0 included."""
        return self.a.shape[self.slot_axis]

    @property
    def num_bytes(self) -> int:
        """Of the stacked arrays."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """What rows are multiplied by."""
        return [self.a, self.b, *([] if self.gain is None else [self.gain])]

    def set_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Multiply by others of the same shapes."""
        self.a, self.b, *gain = arrays
        self.gain = gain[0] if gain else None

    def why_unfit(self, one: LowRank) -> str | None:
        """Why a change cannot be one of this module's; None if it can."""
        if one.kind != self.kind:
            return f"it changes a module of kind {one.kind}, and this one is {self.kind}"
        a, b = self._fitting(one.rank)
        if one.a.shape != tuple(a) or one.b.shape != tuple(b):
            return f"its tensors are {one.a.shape} and {one.b.shape}, not {a} and {b}"
        return None

    def put(
        self,
        slot: int,
        one: LowRank,
        gain: mx.array | None = None,
        factors: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        """Let a slot be a change.

        Nothing is computed before the arrays are evaluated. They are then written where they lie,
        or copied as long as a step in flight needs them as they were.

        Args:
            slot: from 1 on.
            one: that fits.
            gain: as ``dora_gain`` gives it.
            factors: that ``factors_of`` gives of it, if they are known.
        """
        self.reserve(slot + 1)
        self._widen(one.rank)
        a, b = factors or factors_of([one], self._dtype)[0]
        missing = self.b.shape[-2] - one.rank
        a = a if self.rank_axis == -2 else a.swapaxes(-1, -2)
        self.a[self._at(slot)] = _longer(a, self.rank_axis, missing)
        self.b[self._at(slot)] = _longer(b.swapaxes(-1, -2), -2, missing)
        self.set_gain(slot, gain)

    def set_gain(self, slot: int, gain: mx.array | None) -> None:
        """Let a slot be a DoRA of this gain; None for a LoRA."""
        if gain is not None and self.gain is None:
            self.gain = mx.ones((self.num_slots, self._shape[-2]))
        if self.gain is not None:
            self.gain[slot] = 1 if gain is None else gain

    def drop(self, slot: int) -> None:
        """Let a slot be no adapter."""
        self.a[self._at(slot)] = 0
        self.b[self._at(slot)] = 0
        self.set_gain(slot, None)

    def reserve(self, num_slots: int) -> None:
        """Have room for so many slots, by doubling; no row may name one beyond."""
        more = capacity(num_slots) - self.num_slots
        if more <= 0:
            return
        self.a = _longer(self.a, self.slot_axis, more)
        self.b = _longer(self.b, self.slot_axis, more)
        if self.gain is not None:
            self.gain = mx.pad(self.gain, [(0, more), (0, 0)], constant_values=1.0)

    def _widen(self, rank: int) -> None:
        """Have room for this rank."""
        more = -(-rank // RANK_STEP) * RANK_STEP - self.b.shape[-2]
        if more > 0:
            self.a = _longer(self.a, self.rank_axis, more)
            self.b = _longer(self.b, -2, more)

    def _at(self, slot: int) -> tuple[slice | int, ...]:
        return (*[slice(None)] * self.slot_axis, slot)


class LinearStack(AdapterStack):
    """Of a linear layer: ``a`` is ``[slots, r, in]``, ``b`` ``[slots, r, out]``."""

    kind = "linear"

    def __call__(
        self, x: mx.array, y: mx.array, rows: AdapterRows, bias: mx.array | None = None
    ) -> mx.array:
        """The layer's output, changed for each row.

        Args:
            x: its input, ``[B, L, in]``, or the same with these axes merged or split.
            y: its output, ``[B, L, out]``, likewise.
            rows: B of them.
            bias: that is in ``y``, ``[out]``: DoRA leaves it alone.
        """
        if rows.only is not None:
            return self._by_one(x, y, rows.only, bias)
        if x.ndim != 3:
            shape, count = y.shape, rows.slots.size
            x, y = (one.reshape(count, -1, one.shape[-1]) for one in (x, y))
            return self(x, y, rows, bias).reshape(shape)
        x = x.astype(self._dtype)
        if rows.crowd is None:
            change = self._each(x, rows.slots).astype(y.dtype)
        else:
            change = self._together(x, rows.crowd).astype(y.dtype)
        return self.scaled(y + change, rows.slots, bias)

    def _by_one(self, x: mx.array, y: mx.array, slot: int, bias: mx.array | None) -> mx.array:
        """The output ``[..., out]`` of an input ``[..., in]``, changed by one adapter."""
        y = y + (x.astype(self._dtype) @ self.a[slot].T @ self.b[slot]).astype(y.dtype)
        if self.gain is None:
            return y
        gain = self.gain[slot].astype(y.dtype)
        return y * gain if bias is None else (y - bias) * gain + bias

    def scaled(self, y: mx.array, slots: mx.array, bias: mx.array | None = None) -> mx.array:
        """Changed outputs ``[B, L, out]`` times what DoRA says of the rows' slots, int32 ``[B]``.

        ``bias`` is that in ``y``, which DoRA leaves alone.
        """
        if self.gain is None:
            return y
        gain = self.gain[slots][:, None].astype(y.dtype)
        return y * gain if bias is None else (y - bias) * gain + bias

    def _each(self, x: mx.array, slots: mx.array) -> mx.array:
        """Each row by its own adapter."""
        low = mx.gather_mm(x, self.a.swapaxes(-1, -2), rhs_indices=slots)
        return mx.gather_mm(low, self.b, rhs_indices=slots)

    def _together(self, x: mx.array, crowd: Crowd) -> mx.array:
        """All rows by each adapter that many have, of which each row keeps its own."""
        a, b = self.a[crowd.slots], self.b[crowd.slots]
        low = x @ a.flatten(0, 1).T
        if crowd.is_theirs is not None:
            low = mx.where(crowd.is_theirs, low.reshape(*x.shape[:2], *a.shape[:2]), 0)
            low = low.flatten(2)
        change = low @ b.flatten(0, 1)
        if crowd.rest is None or crowd.rest_slots is None:
            return change
        return change.at[crowd.rest].add(self._each(x[crowd.rest], crowd.rest_slots))


class EmbeddingStack(AdapterStack):
    """Of an embedding: ``a`` is ``[slots, vocab, r]``, ``b`` ``[slots, r, dims]``.

    Attributes:
        heads: whether a slot changes the head too, bool ``[slots]``.
    """

    kind = "embedding"
    rank_axis = -1

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """See ``AdapterStack``."""
        super().__init__(shape, dtype)
        self.heads = mx.zeros(1, mx.bool_)

    def arrays(self) -> list[mx.array]:
        """See ``AdapterStack.arrays``."""
        return [self.heads, *super().arrays()]

    def set_arrays(self, arrays: Sequence[mx.array]) -> None:
        """See ``AdapterStack.set_arrays``."""
        self.heads = arrays[0]
        super().set_arrays(arrays[1:])

    def put(
        self,
        slot: int,
        one: LowRank,
        gain: mx.array | None = None,
        factors: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        """See ``AdapterStack.put``."""
        super().put(slot, one, gain, factors)
        self.heads[slot] = one.changes_head

    def reserve(self, num_slots: int) -> None:
        """See ``AdapterStack.reserve``."""
        super().reserve(num_slots)
        self.heads = _longer(self.heads, 0, self.num_slots - self.heads.size)

    def _fitting(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        vocab, dims = self._shape
        return (rank, vocab), (dims, rank)

    def __call__(self, ids: mx.array, y: mx.array, rows: AdapterRows) -> mx.array:
        """The hidden states ``[B, L, dims]`` of token ids ``[B, L]``, changed for each row."""
        if rows.only is not None:
            return self._by_one(ids, y, rows.only)
        slots = rows.slots
        low = self.a[slots[:, None], ids]
        y = y + mx.gather_mm(low, self.b, rhs_indices=slots).astype(y.dtype)
        if self.gain is None:
            return y
        return y * self.gain[slots[:, None], ids][..., None].astype(y.dtype)

    def _by_one(self, ids: mx.array, y: mx.array, slot: int) -> mx.array:
        """The same of ids of any shape, changed by one adapter."""
        y = y + (self.a[slot][ids] @ self.b[slot]).astype(y.dtype)
        return y if self.gain is None else y * self.gain[slot][ids][..., None].astype(y.dtype)

    def head(self, x: mx.array, y: mx.array, rows: AdapterRows) -> mx.array:
        """The logits ``[B, L, vocab]`` of a tied head, changed for each row."""
        if rows.only is not None:
            return self._head_by_one(x, y, rows.only)
        slots = rows.slots
        is_theirs = self.heads[slots][:, None, None]
        low = mx.gather_mm(x.astype(self._dtype), self.b.swapaxes(-1, -2), rhs_indices=slots)
        low = mx.where(is_theirs, low, 0)
        y = y + mx.gather_mm(low, self.a.swapaxes(-1, -2), rhs_indices=slots).astype(y.dtype)
        if self.gain is None:
            return y
        return y * mx.where(is_theirs, self.gain[slots][:, None], 1).astype(y.dtype)

    def _head_by_one(self, x: mx.array, y: mx.array, slot: int) -> mx.array:
        """The same of hidden states of any shape, changed by one adapter."""
        is_changed = self.heads[slot]
        low = mx.where(is_changed, x.astype(self._dtype) @ self.b[slot].T, 0)
        y = y + (low @ self.a[slot].T).astype(y.dtype)
        if self.gain is None:
            return y
        return y * mx.where(is_changed, self.gain[slot], 1).astype(y.dtype)


class ExpertStack(AdapterStack):
    """Of experts: ``a`` is ``[experts, slots, r, in]``, ``b`` ``[experts, slots, r, out]``.

    So an expert and a slot are one index, whose order is that of the experts: see ``expert_slots``.
    """

    kind = "experts"
    slot_axis = 1

    def __call__(
        self, x: mx.array, y: mx.array, both: mx.array, *, sorted_indices: bool
    ) -> mx.array:
        """The outputs of the experts that rows chose, changed for each row.

        Args:
            x: ``[..., 1, in]``, which ``both`` broadcasts with.
            y: ``[..., 1, out]``.
            both: ``expert_slots``, ``[...]``.
            sorted_indices: whether they are.
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
    one.kind: one for one in (LinearStack, EmbeddingStack, ExpertStack)
}


def capacity(num_slots: int) -> int:
    """How many slots there are where at least so many are needed: those after slot 0 double."""
    return 1 if num_slots <= 1 else 1 + (1 << (num_slots - 2).bit_length())


def expert_slots(indices: mx.array, slots: mx.array, num_slots: int) -> mx.array:
    """Experts and slots as one index, which sorts as the experts do.

    Args:
        indices: of the experts that tokens chose, ``[..., k]``.
        slots: int32 ``[B]``, of rows of the same number of tokens each.
        num_slots: of the stacks.
    """
    tokens = indices.size // indices.shape[-1]
    each = mx.repeat(slots, tokens // slots.size).reshape(*indices.shape[:-1], 1)
    return indices * num_slots + each.astype(indices.dtype)


def factors_of(changes: Sequence[LowRank], dtype: mx.Dtype) -> list[tuple[mx.array, mx.array]]:
    """Of each change ``a`` and ``scale * b``, in the dtype of products."""
    firsts = to_mlx([one.a for one in changes], dtype)
    seconds = to_mlx([one.b for one in changes], dtype, [one.scale for one in changes])
    return list(zip(firsts, seconds, strict=True))


def dora_gain(weight: mx.array, one: LowRank) -> mx.array | None:
    """What DoRA multiplies each row of the changed weight by, float32; None of a LoRA.

    Args:
        weight: of the module, unpacked, ``[out, in]`` or ``[vocab, dims]``.
        one: the change of it.
    """
    if one.magnitude is None:
        return None
    a, b, magnitude = to_mlx([*one.tensors()], mx.float32)
    change = one.scale * ((b @ a).T if one.kind == "embedding" else b @ a)
    norm = mx.linalg.norm(weight.astype(mx.float32) + change, axis=1)
    return magnitude / norm


def _longer(array: mx.array, axis: int, more: int) -> mx.array:
    """Zeros behind an axis."""
    if not more:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return mx.pad(array, widths)
