"""The rows of a step that need logits, and the tokens that it takes from the previous step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain

import mlx.core as mx
import numpy as np

from mlx_parallm.grammar.masks import ConstrainedRow, GrammarMasks, RowMasks
from mlx_parallm.types.model_input import InputRows
from mlx_parallm.types.step import PENDING_TOKEN, SampleSpec, ScheduledBatch, ScheduledSequence
from mlx_parallm.worker.device.step_arrays import TokenCopy
from mlx_parallm.worker.generation.paged_cache import offsets_of
from mlx_parallm.worker.sampling.sampler import TokenMasks


@dataclass(frozen=True, slots=True)
class Constraints:
    """The effect of grammars on a step.

    Attributes:
        masks: the masks of constrained rows; None if there are none to apply.
        failed: by sequence, why no token can be chosen for it.
    """

    masks: TokenMasks | None = None
    failed: Mapping[int, str] = field(default_factory=dict)


class GrammarRows:
    """Computes the token masks of steps; without constrained rows it does nothing."""

    def __init__(self, masks: GrammarMasks | None) -> None:
        """``masks`` is None if grammars cannot be compiled for the model's tokens."""
        self._masks = masks

    def forget(self, batch: ScheduledBatch) -> None:
        """Drop the matchers of sequences that have ended."""
        if batch.ended and self._masks is not None:
            self._masks.forget(batch.ended)

    def constrain(
        self,
        rows: StepRows,
        begin_forward: Callable[[], None],
        read_pending: Callable[[], Mapping[int, int]],
    ) -> Constraints:
        """Return the masks of a step whose forward was built.

        Args:
            rows: the step's rows. Where a mask forbids the banned tokens, ``banned_ids`` is
                cleared.
            begin_forward: starts the forward on the device; on a CPU it returns when it has ended.
            read_pending: waits for the previous step and returns the tokens it chose, by sequence.
                It is called by another thread, and only if a row depends on such a token.
        """
        constrained = [
            ConstrainedRow(row, seq_id, spec)
            for row, (seq_id, spec) in enumerate(zip(rows.sampled_ids, rows.specs, strict=True))
            if spec.params.grammar is not None
        ]
        if not constrained:
            return Constraints()
        if self._masks is None:
            seq_ids = [row.seq_id for row in constrained]
            return Constraints(None, dict.fromkeys(seq_ids, "This model has no grammars."))
        is_pending = any(row.spec.has_pending for row in constrained)
        masks = self._compute(
            self._masks, constrained, begin_forward, read_pending if is_pending else dict
        )
        for row in constrained:
            if row.spec.banned_ids:
                rows.specs[row.row] = replace(row.spec, banned_ids=())
        tokens = TokenMasks(masks.rows, masks.words) if masks.rows else None
        return Constraints(tokens, masks.failed)

    def _compute(
        self,
        masks: GrammarMasks,
        constrained: list[ConstrainedRow],
        begin_forward: Callable[[], None],
        read_pending: Callable[[], Mapping[int, int]],
    ) -> RowMasks:
        """Return the masks, computed by another thread while this thread starts the forward.

        Neither thread holds the interpreter lock for long.
        """
        future = self._worker.submit(lambda: masks.compute(constrained, read_pending()))
        try:
            begin_forward()
        finally:
            computed = future.result()
        return computed

    @functools.cached_property
    def _worker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")


def token_array(sequences: Sequence[ScheduledSequence]) -> mx.array:
    """Return all tokens of the step's sequences, int32 ``[T]``; pending ones are -1."""
    tokens = np.fromiter(
        chain.from_iterable(sequence.token_ids for sequence in sequences), np.int32
    )
    return mx.array(tokens)


def spread_proposals(sequences: Sequence[ScheduledSequence]) -> Sequence[ScheduledSequence]:
    """Return the sequences, with each token of one that has proposals as a decode row of its own.

    The result is the same, because a layer writes the KV of all rows before any row attends. So the
    fast paths for steps of decode rows apply to proposals too.
    """
    if not any(sequence.verify for sequence in sequences):
        return sequences
    rows: list[ScheduledSequence] = []
    for sequence in sequences:
        rows += [sequence] if not sequence.verify else single_rows(sequence)
    return rows


def place_proposals(
    sequences: Sequence[ScheduledSequence], token_ids: mx.array, proposals: mx.array
) -> mx.array:
    """Return the step's tokens, int32 ``[T]``, with a draft model's proposals filled in."""
    ends = np.cumsum([len(sequence.token_ids) for sequence in sequences])
    rows = [
        np.arange(end - len(sequence.verify), end)
        for sequence, end in zip(sequences, ends, strict=True)
        if PENDING_TOKEN in sequence.proposals
    ]
    placed = token_ids[:]
    placed[mx.array(np.concatenate(rows).astype(np.int32))] = proposals
    return placed


def single_rows(sequence: ScheduledSequence) -> list[ScheduledSequence]:
    """Return the tokens of a sequence as decode rows."""
    offsets: list[tuple[tuple[int, int], ...]] = [()] * len(sequence.token_ids)
    if sequence.rope_offsets:
        offsets = [((0, offset),) for offset in offsets_of(sequence).tolist()]
    return [
        sequence.with_span(
            sequence.start + index,
            (token,),
            inputs=_inputs_at(sequence, index),
            rope_offsets=offsets[index],
        )
        for index, token in enumerate(sequence.token_ids)
    ]


def _inputs_at(sequence: ScheduledSequence, index: int) -> tuple[InputRows, ...]:
    """Return the row of an input that stands in place of the token with this index."""
    return tuple(
        replace(rows, first_row=rows.first_row + index - rows.offset, num_rows=1, offset=0)
        for rows in sequence.inputs
        if rows.offset <= index < rows.offset + rows.num_rows
    )


class PendingTokens:
    """The tokens that the latest step chooses, by sequence, while they are on the device."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens: mx.array | None = None
        self._copy: TokenCopy | None = None

    def remember(
        self, seq_ids: Sequence[int], tokens: mx.array | None, copy: TokenCopy | None = None
    ) -> None:
        """Keep the tokens of a step, int32: ``tokens[i]`` is that of ``seq_ids[i]``.

        ``copy`` is a copy of the tokens for ``read``; nothing else may be computed from it.
        """
        self._places = {seq_id: place for place, seq_id in enumerate(seq_ids)}
        self._tokens, self._copy = tokens, copy

    def read(self) -> dict[int, int]:
        """Wait for the tokens, and return them by sequence.

        Another thread may call this while a step that takes the tokens is evaluated. It reads the
        copy, because MLX marks an array as computed without a lock: two threads must not use the
        same array.
        """
        if self._copy is None:
            return {}
        chosen = self._copy.read()
        return {seq_id: chosen[place] for seq_id, place in self._places.items()}

    def fill(self, sequences: Sequence[ScheduledSequence]) -> mx.array:
        """Return all tokens of the step's sequences, int32 ``[T]``, with pending ones filled in."""
        pending = [sequence.token_ids[0] == PENDING_TOKEN for sequence in sequences]
        if not any(pending) or self._tokens is None:
            return token_array(sequences)
        # A pending token is the only token of its sequence in a step.
        places = [
            self._places[sequence.seq_id] if is_pending else 0
            for sequence, is_pending in zip(sequences, pending, strict=True)
        ]
        chosen = self._tokens
        if all(pending) and places == list(range(chosen.shape[0])):
            return chosen
        known = token_array(sequences)
        rows = np.cumsum([0, *(len(sequence.token_ids) for sequence in sequences[:-1])])
        mask, source = np.zeros(known.shape, bool), np.zeros(known.shape, np.int32)
        mask[rows], source[rows] = pending, places
        return mx.where(mx.array(mask), chosen[mx.array(source)], known)


class StepRows:
    """The rows of a step that need logits, and for what.

    Attributes:
        sequences: of the step.
        logit_rows: the rows that need logits: ascending indices into the step's T tokens.
        sampled: the rows to sample, as indices into ``logit_rows``.
        specs: how to sample each row of ``sampled``.
        sampled_ids: the sequence of each row of ``sampled``.
        proposals: the proposals of each sequence that is sampled. It has one row more than
            proposals.
        scored: the sequences whose prompts are scored, each with the index into ``logit_rows`` of
            its first row.
        has_pending: True if any token is pending.
    """

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.scored: list[tuple[ScheduledSequence, int]] = []
        self.sequences = sequences
        self.has_pending = any(sequence.token_ids[0] == PENDING_TOKEN for sequence in sequences)
        # Decode rows come first, and are most.
        num_plain = next(
            (index for index, sequence in enumerate(sequences) if not _is_plain(sequence)),
            len(sequences),
        )
        self._has_others = num_plain < len(sequences)
        self._sample_single(sequences[:num_plain])
        self._add(sequences[num_plain:], num_plain)

    def _sample_single(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Add the first sequences, each of one row, as ``_add`` does without a call for each."""
        self.specs = [each.sample for each in sequences if each.sample is not None]
        self.sampled_ids = [sequence.seq_id for sequence in sequences]
        self.proposals: list[tuple[int, ...]] = [()] * len(sequences)
        rows = range(len(sequences))
        self.logit_rows, self.sampled, self._ends = list(rows), list(rows), list(rows)

    def _add(self, sequences: Sequence[ScheduledSequence], first: int) -> None:
        """Add sequences; ``first`` is the first one's first row in the step."""
        for sequence in sequences:
            length = len(sequence.token_ids)
            if sequence.target_ids:
                self.scored.append((sequence, len(self.logit_rows)))
                start = first + sequence.target_start
                self.logit_rows += range(start, start + len(sequence.target_ids))
            if sequence.sample is not None:
                # The last row may have logits already, if its target is scored too.
                has_logits = sequence.target_start + len(sequence.target_ids) == length
                self._sample(sequence, sequence.sample, first + length, has_logits=has_logits)
            first += length

    @property
    def are_plain(self) -> bool:
        """Return True if each sequence decodes one token, and nothing else is asked of it."""
        return not self._has_others and all(
            spec.params.grammar is None and spec.params.num_logprobs is None for spec in self.specs
        )

    @property
    def blocks(self) -> Iterator[int]:
        """Return the KV blocks of all sequences and of their sources."""
        for sequence in self.sequences:
            yield from sequence.block_table
            if sequence.source is not None:
                yield from sequence.source.block_table

    def _sample(
        self, sequence: ScheduledSequence, spec: SampleSpec, end: int, *, has_logits: bool
    ) -> None:
        """Add a sequence's last rows, up to row ``end``, to those that are sampled.

        ``has_logits``: True if the rows are among ``logit_rows`` already.
        """
        if not sequence.verify:
            # Ranges take four times as long, and most sequences have no proposals.
            if not has_logits:
                self.logit_rows.append(end - 1)
            self.sampled.append(len(self.logit_rows) - 1)
            self._ends.append(end - 1)
            self.specs.append(spec)
            self.sampled_ids.append(sequence.seq_id)
            self.proposals.append(())
            return
        count = 1 + len(sequence.verify)
        if not has_logits:
            self.logit_rows += range(end - count, end)
        self.sampled += range(len(self.logit_rows) - count, len(self.logit_rows))
        self._ends += range(end - count, end)
        self.specs += (spec, *sequence.verify)
        self.sampled_ids += [sequence.seq_id] * count
        self.proposals.append(sequence.proposals)

    def fill_proposals(self, tokens: Sequence[int]) -> None:
        """Replace pending proposals by a draft model's tokens, in the order of the sequences."""
        rest = iter(tokens)
        self.proposals = [
            tuple(next(rest) if token == PENDING_TOKEN else token for token in proposals)
            for proposals in self.proposals
        ]

    def value_rows(self) -> dict[int, ScheduledSequence]:
        """Return the rows that want values, as indices into ``logit_rows``, and their sequences."""
        wanted = {sequence.seq_id: sequence for sequence in self.sequences if sequence.values}
        if not wanted:
            return {}
        placed = {
            row: wanted[seq_id]
            for row, seq_id in zip(self.sampled, self.sampled_ids, strict=True)
            if seq_id in wanted
        }
        for sequence, first in self.scored:
            if sequence.values:
                scored = range(first, first + len(sequence.target_ids))
                placed |= dict.fromkeys(scored, sequence)
        return placed

    def pending(self, token_ids: mx.array) -> mx.array | None:
        """Return the input token of every sampled row, int32 ``[rows]``; None if none is pending.

        ``token_ids`` are the step's tokens, int32 ``[T]``.
        """
        if not self.has_pending:
            return None
        return token_ids[mx.array(self._ends)]


def _is_plain(sequence: ScheduledSequence) -> bool:
    """Return True for a decode row that is sampled, and of which nothing else is asked."""
    is_decode = len(sequence.token_ids) == 1 and sequence.start > 0 and not sequence.inputs
    is_sampled = sequence.sample is not None and not sequence.target_ids
    return is_decode and is_sampled and not sequence.values
