"""What all resident adapters change of one module, stacked by slot.

Rows of a batch name their slots, and ``mx.gather_mm`` multiplies each row by its own adapter's
matrices. Slot 0 is no adapter: zeros. Ranks are padded to the largest by zeros, which change
nothing.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.adapters.weights import Kind, LowRank

#: The slot of rows without an adapter.
NO_ADAPTER = 0
# Ranks grow by multiples of this, so that few adapters make the stack anew.
RANK_STEP = 8


class AdapterStack:
    """The low-rank changes of one module.

    Attributes:
        kind: of the module.
        a: ``[slots, in, r]``; ``[slots, vocab, r]`` of an embedding, ``[slots, experts, in, r]`` of
            experts.
        b: ``[slots, r, out]``, ``[slots, r, dims]`` or ``[slots, experts, r, out]``, with the
            scales in it.
        gain: ``[slots, out]``, float32: DoRA's factor of each output; None while no adapter is one.
    """

    def __init__(self, kind: Kind, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Nothing but slot 0.

        Args:
            kind: of the module.
            shape: of its weight, unpacked: ``[out, in]``, ``[vocab, dims]`` or
                ``[experts, out, in]``.
            dtype: that products are computed in.
        """
        self.kind = kind
        self._dtype = dtype
        self._outer = (shape[0],) if kind == "experts" else ()
        out, inner = shape[-2:]
        # An embedding's first factor is chosen by token, and its second gives the hidden state.
        self._inner, self._out = (out, inner) if kind == "embedding" else (inner, out)
        self.a = mx.zeros((1, *self._outer, self._inner, RANK_STEP), dtype)
        self.b = mx.zeros((1, *self._outer, RANK_STEP, self._out), dtype)
        self.gain: mx.array | None = None

    @property
    def num_slots(self) -> int:
        """Slots there is room for, slot 0 included."""
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        """Of the stacked arrays."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """What rows are multiplied by."""
        return [self.a, self.b, *([] if self.gain is None else [self.gain])]

    def why_unfit(self, one: LowRank) -> str | None:
        """Why a change cannot be one of this module's; None if it can."""
        if one.kind != self.kind:
            return f"it changes a module of kind {one.kind}, and this one is {self.kind}"
        a, b = (*self._outer, one.rank, self._inner), (*self._outer, self._out, one.rank)
        if one.a.shape != a or one.b.shape != b:
            return f"its tensors are {one.a.shape} and {one.b.shape}, not {a} and {b}"
        return None

    def put(self, slot: int, one: LowRank, gain: mx.array | None = None) -> None:
        """Let a slot be this change, which fits; ``gain`` as ``dora_gain`` gives it.

        Nothing is computed before the arrays are evaluated. They are then written where they lie,
        or copied as long as a step in flight needs them as they were.
        """
        self.reserve(slot + 1)
        self._widen(one.rank)
        a = one.a.to_mlx().swapaxes(-1, -2).astype(self._dtype)
        b = (one.b.to_mlx().astype(mx.float32) * one.scale).swapaxes(-1, -2).astype(self._dtype)
        missing = self.a.shape[-1] - one.rank
        if missing:
            outer = [(0, 0)] * len(self._outer)
            a = mx.pad(a, [*outer, (0, 0), (0, missing)])
            b = mx.pad(b, [*outer, (0, missing), (0, 0)])
        self.a[slot] = a
        self.b[slot] = b
        if gain is not None and self.gain is None:
            self.gain = mx.ones((self.num_slots, self._out))
        if self.gain is not None:
            self.gain[slot] = mx.ones(self._out) if gain is None else gain

    def drop(self, slot: int) -> None:
        """Let a slot be no adapter."""
        self.a[slot] = 0
        self.b[slot] = 0
        if self.gain is not None:
            self.gain[slot] = 1

    def linear(
        self, x: mx.array, y: mx.array, slots: mx.array, bias: mx.array | None = None
    ) -> mx.array:
        """The output of a linear layer, changed for each row.

        Args:
            x: its input, ``[B, L, in]``.
            y: its output, ``[B, L, out]``.
            slots: int32 ``[B]``.
            bias: that is in ``y``, ``[out]``: DoRA leaves it alone.
        """
        low = mx.gather_mm(x.astype(self._dtype), self.a, rhs_indices=slots)
        change = mx.gather_mm(low, self.b, rhs_indices=slots).astype(y.dtype)
        if self.gain is None:
            return y + change
        gain = self.gain[slots][:, None].astype(y.dtype)
        if bias is None:
            return (y + change) * gain
        return (y + change - bias) * gain + bias

    def embedding(self, ids: mx.array, y: mx.array, slots: mx.array) -> mx.array:
        """The hidden states ``[B, L, dims]`` of token ids ``[B, L]``, changed for each row."""
        low = self.a[slots[:, None], ids]
        return y + mx.gather_mm(low, self.b, rhs_indices=slots).astype(y.dtype)

    def head(self, x: mx.array, y: mx.array, slots: mx.array) -> mx.array:
        """The logits ``[B, L, vocab]`` of a tied head, changed for each row."""
        low = mx.gather_mm(x.astype(self._dtype), self.b.swapaxes(-1, -2), rhs_indices=slots)
        return y + mx.gather_mm(low, self.a.swapaxes(-1, -2), rhs_indices=slots).astype(y.dtype)

    def experts(self, x: mx.array, y: mx.array, indices: mx.array, slots: mx.array) -> mx.array:
        """The outputs of the experts that rows chose, changed for each row.

        Args:
            x: ``[..., 1, in]``, which ``indices`` broadcast with.
            y: ``[..., 1, out]``.
            indices: of the experts, ``[...]``.
            slots: int32, broadcasting to ``indices``.
        """
        both = slots * self.a.shape[1] + indices
        flat = [array.reshape(-1, *array.shape[2:]) for array in (self.a, self.b)]
        low = mx.gather_mm(x.astype(self._dtype), flat[0], rhs_indices=both)
        return y + mx.gather_mm(low, flat[1], rhs_indices=both).astype(y.dtype)

    def reserve(self, num_slots: int) -> None:
        """Have room for so many slots, by doubling; no row may name one beyond."""
        more = (1 << (num_slots - 1).bit_length()) - self.num_slots
        if more <= 0:
            return
        inner = [(0, 0)] * (self.a.ndim - 1)
        self.a = mx.pad(self.a, [(0, more), *inner])
        self.b = mx.pad(self.b, [(0, more), *inner])
        if self.gain is not None:
            self.gain = mx.pad(self.gain, [(0, more), (0, 0)], constant_values=1.0)

    def _widen(self, rank: int) -> None:
        """Have room for this rank."""
        more = -(-rank // RANK_STEP) * RANK_STEP - self.a.shape[-1]
        if more <= 0:
            return
        outer = [(0, 0)] * (self.a.ndim - 2)
        self.a = mx.pad(self.a, [*outer, (0, 0), (0, more)])
        self.b = mx.pad(self.b, [*outer, (0, more), (0, 0)])


def dora_gain(weight: mx.array, one: LowRank) -> mx.array | None:
    """What DoRA multiplies each output by, float32 ``[out]``; None of a LoRA.

    Args:
        weight: of the linear layer, unpacked, ``[out, in]``.
        one: the change of it.
    """
    if one.magnitude is None:
        return None
    change = one.scale * (one.b.to_mlx().astype(mx.float32) @ one.a.to_mlx().astype(mx.float32))
    norm = mx.linalg.norm(weight.astype(mx.float32) + change, axis=1)
    return one.magnitude.to_mlx().astype(mx.float32) / norm
