"""Scheduled batches as bytes: columns of numbers, and what changed in block tables.

A pickled batch of 128 decode rows takes 163 KB, nearly all of it block tables that have not
changed. The encoder of rank 0 and the decoder of a follower each keep the latest table of every
slot, so that a table travels only where it grew or was replaced. What else stays the same while
the same sequences decode is left out too.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, count
from operator import is_not
from typing import Any

from mlx_parallm.types.model_input import InputRows
from mlx_parallm.types.request import DEFAULT_VERSION, SamplingParams
from mlx_parallm.types.step import (
    NO_MOVES,
    PENDING_TOKEN,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    SourceTable,
)

# STAND_IN: the spec of every sampled row on a follower, which samples nothing.
STAND_IN = SampleSpec(params=SamplingParams(), seed=0, position=0, prompt_ids=(), output_ids=())
# Bits of the first number, each of a part that is there.
HAS_MEMBERS, HAS_LENGTHS, HAS_TOKENS, HAS_TABLES, HAS_RARE, HAS_COPIES, HAS_ADAPTERS = (
    1 << bit for bit in range(7)
)
# HEAD: the size of the numbers; the adapters follow them, as JSON.
HEAD = struct.Struct("<I")
PENDING = (PENDING_TOKEN,)
NO_SOURCE = SourceTable(block_table=(), num_tokens=0)
Table = tuple[int, ...]
# NARROW, WIDE: the codes of ``array`` for signed integers of 4 and of 8 bytes.
NARROW, WIDE = "i", "q"


def for_follower(batch: ScheduledBatch) -> ScheduledBatch:
    """Return what a follower gets of a batch: all that decides shapes and writes to the device.

    Samples keep their rows and lose how they are chosen; prompt tokens that are scored keep their
    places and lose their ids. ``moves`` and ``ended`` are empty: moves are ops of their own, and a
    follower has no grammars.
    """
    sequences = tuple(
        replace(
            sequence,
            version=DEFAULT_VERSION,
            sample=None if sequence.sample is None else STAND_IN,
            verify=(STAND_IN,) * len(sequence.verify),
            target_ids=(0,) * len(sequence.target_ids),
            target_start=sequence.target_start if sequence.target_ids else 0,
            prompt_logprobs=None,
            prompt_entropy=False,
            values=False,
        )
        for sequence in batch.sequences
    )
    return replace(batch, sequences=sequences, ended=(), moves=NO_MOVES)


class StepEncoder:
    """Writes the batches of one model; all of them must reach the ``StepDecoder``, in order."""

    def __init__(self) -> None:
        # The members of the latest batch: its sequences, their slots, and their adapters and
        # whether they are sampled. None: the next batch brings its own.
        self._members: tuple[list[int], list[int], list[int]] | None = None
        # The latest table of each slot, and of each row of the latest batch.
        self._tables: dict[int, Table] = {}
        self._latest: list[Table] = []
        self._adapters: Mapping[int, str] = {}

    def encode(self, batch: ScheduledBatch) -> bytes:
        """Return a batch's bytes."""
        rows = batch.sequences
        # A list for each attribute costs less than anything that looks at a row as a whole.
        numbers = [0, batch.step_id, len(rows), *[row.start for row in rows]]
        flags = _add_tokens(numbers, [row.token_ids for row in rows])
        rare = [
            row for row in rows if row.target_ids or row.inputs or row.rope_offsets or row.source
        ]
        if flags & HAS_LENGTHS:
            # Proposals are tokens behind a row's first.
            rare += [row for row in rows if row.verify]
        flags |= self._add_members(numbers, rows, is_rare=bool(rare))
        flags |= self._add_tables(numbers, rows)
        if rare:
            flags |= HAS_RARE
            _add_rare(numbers, rows)
        if batch.block_copies or batch.state_copies:
            flags |= HAS_COPIES
            counts = (len(batch.block_copies), len(batch.state_copies), batch.num_captures)
            numbers += counts
            numbers += chain.from_iterable(batch.block_copies + batch.state_copies)
        text = b""
        if batch.adapters != self._adapters:
            flags |= HAS_ADAPTERS
            self._adapters = dict(batch.adapters)
            text = json.dumps(list(batch.adapters.items())).encode()
        numbers[0] = flags
        packed = pack_numbers(numbers)
        return HEAD.pack(len(packed)) + packed + text

    def _add_members(
        self, numbers: list[int], rows: Sequence[ScheduledSequence], *, is_rare: bool
    ) -> int:
        """Add the members of a batch, unless they are those of the batch before."""
        slots = [row.slot for row in rows]
        samples = [
            row.adapter_slot if row.sample is not None else ~row.adapter_slot for row in rows
        ]
        members = ([row.seq_id for row in rows], slots, samples)
        if members == self._members and not is_rare:
            return 0
        assert not any(row.draft for row in rows), "a draft model runs on one rank only"
        # Rows with rare parts are made anew, so the next batch brings its members.
        self._members = None if is_rare else members
        self._latest = [self._tables.get(slot, ()) for slot in slots]
        numbers += chain.from_iterable(members)
        return HAS_MEMBERS

    def _add_tables(self, numbers: list[int], rows: Sequence[ScheduledSequence]) -> int:
        """Add the tables that changed: row, leading blocks that stay, number of new ones, these."""
        tables, latest = [row.block_table for row in rows], self._latest
        changed = list(compress(count(), map(is_not, tables, latest)))
        self._latest = tables
        if not changed:
            return 0
        numbers.append(len(changed))
        for place in changed:
            old, new = latest[place], tables[place]
            self._tables[rows[place].slot] = new
            num_kept = _num_shared(old, new)
            numbers += (place, num_kept, len(new) - num_kept)
            numbers += new[num_kept:]
        return HAS_TABLES


class StepDecoder:
    """Reads what one ``StepEncoder`` wrote."""

    def __init__(self) -> None:
        # ``ScheduledSequence``s, which nobody else changes: see ``decode``.
        self._rows: tuple[Any, ...] = ()
        self._tables: dict[int, Table] = {}
        self._adapters: Mapping[int, str] = {}

    def decode(self, data: bytes | bytearray | memoryview) -> ScheduledBatch:
        """Return a batch as ``for_follower`` gives it.

        It may be used until the next one is decoded: while the same sequences run, batches share
        their rows, because to make 128 of them takes as long as everything else together.
        """
        view = memoryview(data)
        end = HEAD.size + HEAD.unpack_from(view)[0]
        numbers = NumberReader(view[HEAD.size : end])
        flags, step_id, num_rows = numbers.take(3)
        starts, tokens = numbers.take(num_rows), _read_tokens(numbers, flags, num_rows)
        if flags & HAS_MEMBERS:
            self._make_rows(numbers, num_rows)
        rows = self._rows
        for row, start, own_tokens in zip(rows, starts, tokens, strict=True):
            row.start = start
            row.token_ids = own_tokens
        if flags & HAS_TABLES:
            self._read_tables(numbers)
        if flags & HAS_RARE:
            _read_rare(numbers, rows)
        num_copies = numbers.take(3) if flags & HAS_COPIES else (0, 0, 0)
        if flags & HAS_ADAPTERS:
            self._adapters = dict(json.loads(bytes(view[end:])))
        return ScheduledBatch(
            step_id=step_id,
            sequences=rows,
            block_copies=_pairs(numbers.take(2 * num_copies[0])),
            state_copies=_pairs(numbers.take(2 * num_copies[1])),
            num_captures=num_copies[2],
            adapters=self._adapters,
        )

    def _make_rows(self, numbers: NumberReader, num_rows: int) -> None:
        """Make the rows of other members; starts and tokens are set later."""
        seq_ids, slots, samples = (numbers.take(num_rows) for _ in range(3))
        self._rows = tuple(
            ScheduledSequence(
                seq_id=seq_id,
                slot=slot,
                start=0,
                token_ids=PENDING,
                block_table=self._tables.get(slot, ()),
                adapter_slot=max(sample, ~sample),
                sample=STAND_IN if sample >= 0 else None,
            )
            for seq_id, slot, sample in zip(seq_ids, slots, samples, strict=True)
        )

    def _read_tables(self, numbers: NumberReader) -> None:
        for _ in range(numbers.number()):
            place, num_kept, num_added = numbers.take(3)
            row = self._rows[place]
            kept = row.block_table
            if num_kept < len(kept):
                kept = kept[:num_kept]
            row.block_table = self._tables[row.slot] = (*kept, *numbers.take(num_added))


def _add_tokens(numbers: list[int], token_ids: Sequence[tuple[int, ...]]) -> int:
    """Add the rows' tokens; nothing if all are single pending tokens."""
    try:
        flat = [token for (token,) in token_ids]
    except ValueError:
        numbers += map(len, token_ids)
        numbers += chain.from_iterable(token_ids)
        return HAS_TOKENS | HAS_LENGTHS
    if flat.count(PENDING_TOKEN) == len(flat):
        return 0
    numbers += flat
    return HAS_TOKENS


def _read_tokens(numbers: NumberReader, flags: int, num_rows: int) -> list[tuple[int, ...]]:
    if flags & HAS_LENGTHS:
        return [tuple(numbers.take(length)) for length in numbers.take(num_rows)]
    if flags & HAS_TOKENS:
        return [(token,) for token in numbers.take(num_rows)]
    return [PENDING] * num_rows


def _add_rare(numbers: list[int], rows: Sequence[ScheduledSequence]) -> None:
    """Add what few rows have, for all rows."""
    for row in rows:
        sizes = (len(row.verify), len(row.target_ids), len(row.inputs), len(row.rope_offsets))
        numbers += (*sizes, row.target_start if row.target_ids else 0, len(row.kept_slots))
        numbers += row.kept_slots
        for part in row.inputs:
            numbers += (part.slot, part.first_row, part.num_rows, part.offset)
        numbers += chain.from_iterable(row.rope_offsets)
        source = row.source or NO_SOURCE
        numbers += (source.num_tokens, len(source.block_table), *source.block_table)


def _read_rare(numbers: NumberReader, rows: Sequence[Any]) -> None:
    """Give rows what ``_add_rare`` added."""
    for row in rows:
        num_proposals, num_targets, num_inputs, num_offsets = numbers.take(4)
        row.target_start, num_kept = numbers.take(2)
        row.kept_slots = tuple(numbers.take(num_kept))
        row.verify = (STAND_IN,) * num_proposals
        row.target_ids = (0,) * num_targets
        row.inputs = tuple(_read_input(numbers) for _ in range(num_inputs))
        row.rope_offsets = _pairs(numbers.take(2 * num_offsets))
        num_source_tokens, num_blocks = numbers.take(2)
        source = SourceTable(
            block_table=tuple(numbers.take(num_blocks)), num_tokens=num_source_tokens
        )
        row.source = source if num_source_tokens else None


def _read_input(numbers: NumberReader) -> InputRows:
    slot, first_row, num_rows, offset = numbers.take(4)
    return InputRows(slot=slot, first_row=first_row, num_rows=num_rows, offset=offset)


def _pairs(flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _num_shared(old: Table, new: Table) -> int:
    """Return how many leading blocks two tables share."""
    if new[: len(old)] == old:
        return len(old)
    pairs = enumerate(zip(old, new, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(old), len(new)))


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Return the bytes of numbers below 2**63; the first byte says how wide they are."""
    try:
        # Trying costs less than looking for the largest number.
        return NARROW.encode() + array(NARROW, numbers).tobytes()
    except OverflowError:
        return WIDE.encode() + array(WIDE, numbers).tobytes()


class NumberReader:
    """Reads numbers one after the other."""

    def __init__(self, data: bytes | memoryview) -> None:
        numbers = array(WIDE if data[:1] == WIDE.encode() else NARROW)
        numbers.frombytes(data[1:])
        self._numbers = numbers.tolist()
        self._next = 0

    def number(self) -> int:
        """Return the next number."""
        self._next += 1
        return self._numbers[self._next - 1]

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` numbers."""
        start = self._next
        self._next += count
        return self._numbers[start : self._next]
