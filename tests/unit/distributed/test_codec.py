"""Followers get every batch that rank 0 encodes, as it would be without the codec."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.distributed.codec import (
    STAND_IN,
    NumberReader,
    StepDecoder,
    StepEncoder,
    for_follower,
    pack_numbers,
)
from mlx_parallm.types.model_input import InputRows
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import (
    PENDING_TOKEN,
    DraftInput,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
)
from mlx_parallm.worker.generation.step_rows import StepRows

BLOCK_SIZE = 4
NUM_SLOTS = 6
SPEC = SampleSpec(
    params=SamplingParams(temperature=0.5),
    seed=3,
    position=7,
    prompt_ids=(1, 2),
    output_ids=[5],
    banned_ids=(9,),
)


@dataclass
class Running:
    """A sequence that holds a slot and blocks, as the scheduler has it."""

    seq_id: int
    slot: int
    adapter_slot: int
    length: int = 0
    table: tuple[int, ...] = ()


@dataclass
class Steps:
    """Draws batches as a scheduler makes them: sequences come, grow, fork, are preempted, end."""

    data: st.DataObject
    running: dict[int, Running] = field(default_factory=dict[int, Running])
    num_sequences: int = 0
    num_blocks: int = 0

    def draw(self, step_id: int) -> ScheduledBatch:
        """Return the next batch."""
        for slot in self.data.draw(st.lists(st.sampled_from(range(NUM_SLOTS)), max_size=2)):
            self.running.pop(slot, None)
        copies: list[tuple[int, int]] = []
        state_copies: list[tuple[int, int]] = []
        for slot in self.data.draw(st.lists(st.sampled_from(range(NUM_SLOTS)), max_size=3)):
            if slot not in self.running:
                self._begin(slot, copies, state_copies)
        rows = [self._row(sequence) for sequence in self._chosen()]
        return ScheduledBatch(
            step_id=step_id,
            sequences=tuple(rows),
            block_copies=tuple(copies),
            state_copies=tuple(state_copies),
            ended=(step_id,),
            adapters={row.adapter_slot: f"digest-{row.adapter_slot}" for row in rows},
        )

    def _begin(
        self, slot: int, copies: list[tuple[int, int]], state_copies: list[tuple[int, int]]
    ) -> None:
        """Start a sequence, from nothing or as a fork that copies the last block of another."""
        self.num_sequences += self.data.draw(st.sampled_from([1, 1 << 33]))
        new = Running(self.num_sequences, slot, self.data.draw(st.integers(0, 2)))
        parent = self.data.draw(st.sampled_from([None, *self.running.values()]))
        if parent is not None and parent.length:
            new.length, new.table = parent.length, (*parent.table[:-1], self._block())
            copies.append((parent.table[-1], new.table[-1]))
            state_copies.append((parent.slot, slot))
        self.running[slot] = new

    def _chosen(self) -> list[Running]:
        """Return the sequences of a step: nearly always all of them, in a steady order."""
        sequences = list(self.running.values())
        if self.data.draw(st.integers(0, 4)) == 0:
            return self.data.draw(st.permutations(sequences))[:3]
        return sequences

    def _block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks

    def _row(self, sequence: Running) -> ScheduledSequence:
        decodes = sequence.length > 0 and self.data.draw(st.integers(0, 3)) > 0
        count = 1 if decodes else self.data.draw(st.integers(1, 9))
        tokens = tuple(range(100, 100 + count))
        if decodes:
            tokens = self.data.draw(st.sampled_from([(PENDING_TOKEN,), (7,), (1 << 20,)]))
        start, sequence.length = sequence.length, sequence.length + count
        missing = -(-sequence.length // BLOCK_SIZE) - len(sequence.table)
        if missing > 0:
            sequence.table += tuple(self._block() for _ in range(missing))
        row = ScheduledSequence(
            seq_id=sequence.seq_id,
            slot=sequence.slot,
            start=start,
            token_ids=tokens,
            block_table=sequence.table,
            adapter_slot=sequence.adapter_slot,
            version="v7",
            sample=self.data.draw(st.sampled_from([SPEC, SPEC, None])),
        )
        return replace(row, **self._rare(count)) if self.data.draw(st.booleans()) else row

    def _rare(self, count: int) -> dict[str, object]:
        """Return what few rows of ``count`` tokens have."""
        parts: dict[str, object] = {}
        draw = self.data.draw
        if count > 1 and draw(st.booleans()):
            num_proposals = draw(st.integers(1, count - 1))
            parts |= {"verify": (SPEC,) * num_proposals, "sample": SPEC}
            if draw(st.booleans()):
                parts |= {"kept_slots": tuple(range(NUM_SLOTS, NUM_SLOTS + num_proposals))}
        elif draw(st.booleans()):
            start = draw(st.integers(0, count - 1))
            targets = tuple(range(50, 50 + draw(st.integers(1, count - start))))
            parts |= {"target_ids": targets, "target_start": start, "prompt_logprobs": 2}
        if draw(st.booleans()):
            rows = InputRows(slot=draw(st.integers(0, 9)), first_row=3, num_rows=1, offset=0)
            parts |= {"inputs": (rows,) * draw(st.integers(1, 2))}
        if draw(st.booleans()):
            parts |= {"rope_offsets": ((0, draw(st.integers(-300, 300))), (count - 1, 4))}
        return parts


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 12))
def test_followers_get_every_batch(data: st.DataObject, num_steps: int) -> None:
    steps, encoder, decoder = Steps(data), StepEncoder(), StepDecoder()
    for step_id in range(num_steps):
        batch = steps.draw(step_id)
        before = pickle.dumps(batch)
        expected = for_follower(batch)
        assert decoder.decode(encoder.encode(batch)) == expected
        assert pickle.dumps(batch) == before
        own, theirs = StepRows(batch.sequences), StepRows(expected.sequences)
        for name in ("logit_rows", "sampled", "sampled_ids", "has_pending"):
            assert getattr(own, name) == getattr(theirs, name)


def decode_batch(
    step_id: int, tables: list[tuple[int, ...]], token: int = PENDING_TOKEN
) -> ScheduledBatch:
    return ScheduledBatch(
        step_id=step_id,
        sequences=tuple(
            ScheduledSequence(
                seq_id=1000 + slot,
                slot=slot,
                start=512 + step_id,
                token_ids=(token,),
                block_table=table,
                sample=SPEC,
            )
            for slot, table in enumerate(tables)
        ),
    )


def test_steps_of_128_rows_take_no_more_than_4_kb() -> None:
    encoder = StepEncoder()
    tables = [tuple(range(33 * row, 33 * row + 33)) for row in range(128)]
    encoder.encode(decode_batch(0, tables))
    assert len(encoder.encode(decode_batch(1, tables))) < 600
    # All rows need a new block in the same step, and their tokens are known.
    tables = [(*table, 5000 + row) for row, table in enumerate(tables)]
    assert len(encoder.encode(decode_batch(2, tables, token=151_000))) <= 4096
    # Another sequence has the first slot, with its own table.
    assert len(encoder.encode(decode_batch(3, [(9, 8), *tables[1:]]))) <= 4096


def test_a_table_that_did_not_change_stays_the_same_object() -> None:
    # Attention backends see by that which rows of their table arrays to write anew.
    encoder, decoder = StepEncoder(), StepDecoder()
    tables = [(1, 2), (3,)]
    first = decoder.decode(encoder.encode(decode_batch(0, tables))).sequences[0].block_table
    grown = decoder.decode(encoder.encode(decode_batch(1, [tables[0], (3, 4)])))
    other = decoder.decode(encoder.encode(decode_batch(2, tables[:1])))
    assert grown.sequences[0].block_table is first
    assert other.sequences[0].block_table is first


def test_followers_learn_neither_prompts_nor_how_tokens_are_chosen() -> None:
    batch = decode_batch(0, [(1,)])
    sequence = StepDecoder().decode(StepEncoder().encode(batch)).sequences[0]
    assert sequence.sample is STAND_IN
    assert SPEC.params.temperature == 0.5
    assert STAND_IN.params == SamplingParams()


def test_draft_models_are_refused() -> None:
    batch = decode_batch(0, [(1,)])
    row = replace(batch.sequences[0], draft=DraftInput(start=0, token_ids=(1,)))
    with pytest.raises(AssertionError, match="draft model"):
        StepEncoder().encode(replace(batch, sequences=(row,)))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_numbers_of_any_width_come_back(numbers: list[int]) -> None:
    assert NumberReader(pack_numbers(numbers)).take(len(numbers)) == numbers
