"""Groups of a step's sequences, for modules that cannot take one row per token."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.attention.dense import rows_within
from mlx_parallm.worker.generation.paged_cache import PackedStep, UnsupportedAttentionError
from mlx_parallm.worker.lora.rows import AdapterRows


class RowGroup:
    """Decode rows as ``[B, 1]``, rows with L - 1 proposals as ``[B, L]``, or a chunk as ``[1, L]``.

    Attributes:
        sequences: the B sequences of the rows, or the one sequence of the chunk.
        rows: the indices of their tokens among the step's T rows, sequence by sequence.
        length: the number L of tokens of each sequence.
        offset: the position of the first token: an int for one sequence, otherwise int32 ``[B]``.
        plan: the attention backend's plan for these sequences alone.
        table: the block tables, int32 ``[B, blocks]``.
        padded_len: the tokens that ``table`` spans; for one sequence, its tokens so far.
        continues: True for a part of a chunk whose rows before are the group before.
    """

    def __init__(
        self,
        sequences: Sequence[ScheduledSequence],
        rows: np.ndarray,
        backend: AttentionBackend,
        block_size: int,
        *,
        continues: bool = False,
    ) -> None:
        self.sequences = sequences
        self.rows = rows
        self.continues = continues
        self.length = len(sequences[0].token_ids)
        self._starts = np.array([sequence.start for sequence in sequences], dtype=np.int32)
        self.offset = int(self._starts[0]) if len(sequences) == 1 else mx.array(self._starts)
        self.plan = backend.plan(sequences)
        used = [-(-(sequence.start + self.length) // block_size) for sequence in sequences]
        table = np.zeros((len(sequences), max(used)), dtype=np.int32)
        for row, (sequence, count) in enumerate(zip(sequences, used, strict=True)):
            table[row, :count] = sequence.block_table[:count]
        self.table = mx.array(table)
        self.padded_len = max(used) * block_size
        if len(sequences) == 1:
            self.padded_len = sequences[0].start + self.length
        self._masks: dict[int | None, mx.array] = {}

    @property
    def slots(self) -> list[int]:
        """The state slots of the sequences."""
        return [sequence.slot for sequence in self.sequences]

    @functools.cached_property
    def adapter_rows(self) -> AdapterRows | None:
        """The adapters of the sequences; None if no sequence has one."""
        slots = [sequence.adapter_slot for sequence in self.sequences]
        return AdapterRows(mx.array(np.array(slots, dtype=np.int32))) if any(slots) else None

    @property
    def is_fresh(self) -> bool:
        """True if the group is one sequence that begins in this step."""
        return len(self.sequences) == 1 and self.sequences[0].start == 0

    def mask(self, window: int | None, *, as_array: bool) -> mx.array | str | None:
        """Return the mask of a dense cache of ``padded_len`` positions, in mlx_lm's forms.

        They are None, "causal" and a bool array. The arguments are those of ``WindowMask``.
        """
        if len(self.sequences) == 1 and (window is None or window >= self.padded_len):
            if self.length == 1:
                return None
            if not as_array:
                return "causal"
            window = None
        if window not in self._masks:
            self._masks[window] = self._array_mask(window)
        return self._masks[window]

    def take(self, array: mx.array, num_rows: int) -> mx.array:
        """Return this group's part of an array of packed rows, ``[T, 1, ...]``.

        An array of another shape is returned as it is.
        """
        if array.ndim < 2 or array.shape[:2] != (num_rows, 1):
            return array
        part = array[int(self.rows[0]) : int(self.rows[-1]) + 1]
        if len(self.rows) != part.shape[0]:
            part = array[mx.array(self.rows.astype(np.int32))]
        if self.length == 1:
            return part
        # An array [T, 1, 1, 1] is a factor of [B, H, L, D]. All others get their tokens in axis 1.
        is_factor = array.ndim == 4 and array.shape[1:] == (1, 1, 1)
        shape = (1, self.length, 1) if is_factor else (self.length, *array.shape[2:])
        return part.reshape(len(self.sequences), *shape)

    def pack(self, array: mx.array) -> mx.array:
        """Return an output ``[B, L, ...]`` as packed rows ``[rows, 1, ...]``."""
        if array.ndim >= 2 and array.shape[:2] == (len(self.sequences), self.length):
            return array if self.length == 1 else array.reshape(-1, 1, *array.shape[2:])
        raise UnsupportedAttentionError(f"an output of shape {array.shape} has no rows")

    def _array_mask(self, window: int | None) -> mx.array:
        columns = np.arange(self.padded_len)
        positions = (self._starts[:, None] + np.arange(self.length))[:, None, :, None]
        if len(self.sequences) == 1 and self.length > 1:
            positions = positions[0, 0]
        seen: Any = columns <= positions
        if window is not None:
            seen &= columns > positions - window
        return mx.array(seen)


class DecodeGroup:
    """All rows of a step of decode rows, padding included, while a function is traced.

    Attributes:
        rows: the indices 0 to T - 1.
        offset: the positions of the rows, int32 ``[T]``.
        plan: the attention backend's plan.
        table: the block tables, int32 ``[T, blocks]``; None if no split module reads keys.
        padded_len: the tokens that ``table`` spans.
        adapter_rows: the adapters of the rows; None if no row has one.
    """

    length = 1
    is_fresh = False
    continues = False

    def __init__(self, step: PackedStep, block_size: int, adapter_rows: AdapterRows | None) -> None:
        self.offset = step.positions
        self.rows = np.arange(self.offset.shape[0])
        self.plan = step.plan
        self.table = step.tables
        self.padded_len = 0 if self.table is None else self.table.shape[1] * block_size
        self.adapter_rows = adapter_rows
        self._masks: dict[int | None, mx.array] = {}

    def take(self, array: mx.array, num_rows: int) -> mx.array:
        """See ``RowGroup.take``; this group has all rows."""
        del num_rows
        return array

    def pack(self, array: mx.array) -> mx.array:
        """See ``RowGroup.pack``."""
        if array.ndim >= 2 and array.shape[:2] == (len(self.rows), 1):
            return array
        raise UnsupportedAttentionError(f"an output of shape {array.shape} has no rows")

    def mask(self, window: int | None, *, as_array: bool) -> mx.array:
        """See ``RowGroup.mask``; it is an array, as there are several sequences."""
        del as_array
        if window not in self._masks:
            columns, positions = mx.arange(self.padded_len), self.offset[:, None, None, None]
            seen = columns <= positions
            if window is not None:
                seen &= columns > positions - window
            self._masks[window] = seen
        return self._masks[window]


class ProposalGroup:
    """Sequences with proposals and without as ``[B, L]``, padding included, in a traced function.

    For modules with states. The step has a row for each token, and rows of padding.

    Attributes:
        rows: the indices 0 to T - 1.
        length: the number L of tokens of each sequence; those beyond its own mean nothing.
        offset: the positions of the sequences' first rows, int32 ``[B]``.
        adapter_rows: the adapters of the sequences; None if no row has one.
    """

    is_fresh = False
    continues = False
    table = None
    padded_len = 0

    def __init__(
        self, step: PackedStep, taken: mx.array, packed: mx.array, adapters: AdapterRows | None
    ) -> None:
        """Group the rows of a step.

        Args:
            step: the forward.
            taken: the row of each token of the group, int32 ``[B, L]``.
            packed: the token in the group of each row, int32 ``[T]``.
            adapters: the adapters of the rows; None if no row has one.
        """
        self._taken = taken
        self._packed = packed
        self.rows = np.arange(packed.shape[0])
        self.length = taken.shape[1]
        self.plan = step.plan
        self.offset = step.positions[taken[:, 0]]
        self.adapter_rows = adapters and AdapterRows(adapters.slots[taken[:, 0]])

    def take(self, array: mx.array, num_rows: int) -> mx.array:
        """See ``RowGroup.take``."""
        if array.ndim < 2 or array.shape[:2] != (num_rows, 1):
            return array
        return array[:, 0][self._taken]

    def pack(self, array: mx.array) -> mx.array:
        """See ``RowGroup.pack``; it returns as many rows as the step has."""
        if array.ndim >= 2 and array.shape[:2] == self._taken.shape:
            return array.reshape(-1, 1, *array.shape[2:])[self._packed]
        raise UnsupportedAttentionError(f"an output of shape {array.shape} has no rows")

    def mask(self, window: int | None, *, as_array: bool) -> mx.array:
        """Raise UnsupportedAttentionError: modules with states need no mask."""
        raise UnsupportedAttentionError("a module with a state attends")


Group = RowGroup | DecodeGroup | ProposalGroup


def make_groups(
    sequences: Sequence[ScheduledSequence],
    backend: AttentionBackend,
    block_size: int,
    *,
    batch_decode: bool,
    batch_proposals: bool = False,
    max_scores: float = math.inf,
) -> list[RowGroup]:
    """Return the groups of a step: all decode rows, and each prefill chunk by itself.

    Args:
        sequences: the step's sequences.
        backend: the attention backend.
        block_size: the tokens of a block.
        batch_decode: False to make each decode row a group by itself too.
        batch_proposals: True to make one group of all rows with proposals that have the same
            number of tokens; False to make each a group by itself.
        max_scores: most scores of a head that a group of a chunk has; longer chunks are cut into
            several groups.
    """
    firsts = np.cumsum([0, *(len(sequence.token_ids) for sequence in sequences)])
    batches: dict[int, list[int]] = {1: []}
    groups: list[RowGroup] = []
    for index, sequence in enumerate(sequences):
        length = len(sequence.token_ids)
        is_batched = batch_proposals if sequence.verify else batch_decode and length == 1
        # A new sequence has no state yet that could be stacked with those of others.
        if is_batched and sequence.start > 0:
            batches.setdefault(length, []).append(index)
            continue
        # A row with proposals stays whole, because its states are kept as a whole.
        for first, part in _cut(sequence, math.inf if sequence.verify else max_scores):
            rows = firsts[index] + np.arange(first, first + len(part.token_ids))
            groups.append(RowGroup([part], rows, backend, block_size, continues=first > 0))
    whole = [
        RowGroup(
            [sequences[index] for index in batch],
            (firsts[batch][:, None] + np.arange(length)).ravel(),
            backend,
            block_size,
        )
        for length, batch in batches.items()
        if batch
    ]
    return whole + groups


def _cut(sequence: ScheduledSequence, max_scores: float) -> Iterator[tuple[int, ScheduledSequence]]:
    """Yield parts of a chunk with at most so many scores, each with its first row's index."""
    length, first = len(sequence.token_ids), 0
    while first < length:
        start = sequence.start + first
        last = min(length, first + rows_within(start, max_scores))
        if last - first == length:
            yield 0, sequence
        else:
            yield first, replace(sequence, start=start, token_ids=sequence.token_ids[first:last])
        first = last


def join_outputs(groups: Sequence[Group], outputs: Sequence[Any]) -> Any:
    """Return the outputs of all groups as packed rows, in the order of the step's rows.

    Tuples and lists are joined element by element; outputs that are no arrays are the first's.
    """
    first = outputs[0]
    if isinstance(first, tuple | list):
        return type(first)(join_outputs(groups, part) for part in zip(*outputs, strict=True))
    if not isinstance(first, mx.array):
        return first
    if len(groups) == 1 and groups[0].length == 1:
        return groups[0].pack(first)
    parts = [group.pack(output) for group, output in zip(groups, outputs, strict=True)]
    joined = mx.concatenate(parts, axis=0)
    rows = np.concatenate([group.rows for group in groups])
    if (rows[:-1] < rows[1:]).all():
        return joined
    return joined[mx.array(np.argsort(rows).astype(np.int32))]
