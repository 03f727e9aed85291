"""Which rows of a step matter to whom, and the tokens that it takes from the step before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import PENDING_TOKEN, SampleSpec, ScheduledSequence


def token_array(sequences: Sequence[ScheduledSequence]) -> mx.array:
    """The step's tokens one after the other, int32 ``[T]``; pending ones as they stand."""
    tokens = np.fromiter(chain.from_iterable(one.token_ids for one in sequences), np.int32)
    return mx.array(tokens)


def spread_proposals(sequences: Sequence[ScheduledSequence]) -> Sequence[ScheduledSequence]:
    """The same rows, with each token of a sequence that has proposals as a decode row of its own.

    All rows are written before any attends, so that each sees those before it. What is made for
    steps of decode rows then serves them too.
    """
    if not any(one.verify for one in sequences):
        return sequences
    rows: list[ScheduledSequence] = []
    for one in sequences:
        rows += [one] if not one.verify else single_rows(one)
    return rows


def place_proposals(
    sequences: Sequence[ScheduledSequence], token_ids: mx.array, proposals: mx.array
) -> mx.array:
    """The step's tokens, int32 ``[T]``, with a draft model's proposals in their places."""
    ends = np.cumsum([len(one.token_ids) for one in sequences])
    rows = [
        np.arange(end - len(one.verify), end)
        for one, end in zip(sequences, ends, strict=True)
        if PENDING_TOKEN in one.proposals
    ]
    placed = token_ids[:]
    placed[mx.array(np.concatenate(rows).astype(np.int32))] = proposals
    return placed


def single_rows(one: ScheduledSequence) -> list[ScheduledSequence]:
    """The tokens of a sequence as decode rows."""
    return [
        ScheduledSequence(
            seq_id=one.seq_id,
            slot=one.slot,
            start=position,
            token_ids=(token,),
            block_table=one.block_table,
            inputs=one.inputs if position == one.start else (),
        )
        for position, token in enumerate(one.token_ids, one.start)
    ]


class PendingTokens:
    """The tokens that the latest step chooses, on the device, by sequence."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens: mx.array | None = None
        self._copy: mx.array | None = None

    def remember(
        self, seq_ids: Sequence[int], tokens: mx.array | None, copy: mx.array | None = None
    ) -> None:
        """Keep what a step chooses: ``tokens[i]`` for ``seq_ids[i]``.

        ``copy`` has the same tokens for ``read``; nothing else may be computed from it.
        """
        self._places = {seq_id: place for place, seq_id in enumerate(seq_ids)}
        self._tokens, self._copy = tokens, copy

    def read(self) -> dict[int, int]:
        """The tokens by sequence; waits for them.

        Another thread may call it while a step is evaluated that takes the tokens themselves: MLX
        keeps in an array whether it is there, without a lock, so that two threads must not look at
        the same one.
        """
        if self._copy is None:
            return {}
        chosen = np.array(self._copy).tolist()
        return {seq_id: chosen[place] for seq_id, place in self._places.items()}

    def fill(self, sequences: Sequence[ScheduledSequence]) -> mx.array:
        """The step's tokens one after the other, int32 ``[T]``, pending ones in their places."""
        pending = [one.token_ids[0] == PENDING_TOKEN for one in sequences]
        if not any(pending) or self._tokens is None:
            return token_array(sequences)
        # A pending token is all that its sequence runs, and such rows come first in a step.
        places = [
            self._places[one.seq_id] if waits else 0
            for one, waits in zip(sequences, pending, strict=True)
        ]
        chosen = self._tokens.astype(mx.int32)
        if all(pending) and places == list(range(chosen.shape[0])):
            return chosen
        known = token_array(sequences)
        rows = np.cumsum([0, *(len(one.token_ids) for one in sequences[:-1])])
        mask, source = np.zeros(known.shape, bool), np.zeros(known.shape, np.int32)
        mask[rows], source[rows] = pending, places
        return mx.where(mx.array(mask), chosen[mx.array(source)], known)


class StepRows:
    """Which of a step's tokens need logits, and where they are among those.

    Attributes:
        wanted: ascending indices into the concatenation of all tokens.
        sampled: places in ``wanted`` of the rows to sample, for which ``specs``
            and ``sampled_ids`` are.
        proposals: of every sequence that is sampled; it has a row for each and one before them.
        scored: sequences whose prompt is scored, and the place of their first row in ``wanted``.
        has_pending: whether any token is still being chosen.
    """

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.wanted: list[int] = []
        self.sampled: list[int] = []
        self.specs: list[SampleSpec] = []
        self.sampled_ids: list[int] = []
        self.proposals: list[tuple[int, ...]] = []
        self.scored: list[tuple[ScheduledSequence, int]] = []
        self._ends: list[int] = []
        self.has_pending = any(one.token_ids[0] == PENDING_TOKEN for one in sequences)
        first = 0
        for one in sequences:
            length = len(one.token_ids)
            if one.target_ids:
                self.scored.append((one, len(self.wanted)))
                start = first + one.target_start
                self.wanted += range(start, start + len(one.target_ids))
            if one.sample is not None:
                # The last row may be wanted already, when its target is scored too.
                is_wanted = one.target_start + len(one.target_ids) == length
                self._sample(one, one.sample, first + length, is_wanted=is_wanted)
            first += length

    def _sample(
        self, one: ScheduledSequence, spec: SampleSpec, end: int, *, is_wanted: bool
    ) -> None:
        """Sample a sequence's last rows; ``end`` is behind them."""
        if not one.verify:
            # The same as below, for one row: nearly all are such, and ranges take four times as
            # long.
            if not is_wanted:
                self.wanted.append(end - 1)
            self.sampled.append(len(self.wanted) - 1)
            self._ends.append(end - 1)
            self.specs.append(spec)
            self.sampled_ids.append(one.seq_id)
            self.proposals.append(())
            return
        count = 1 + len(one.verify)
        if not is_wanted:
            self.wanted += range(end - count, end)
        self.sampled += range(len(self.wanted) - count, len(self.wanted))
        self._ends += range(end - count, end)
        self.specs += (spec, *one.verify)
        self.sampled_ids += [one.seq_id] * count
        self.proposals.append(one.proposals)

    def fill_proposals(self, tokens: Sequence[int]) -> None:
        """Take in what a draft model proposed, in the order of the sequences."""
        rest = iter(tokens)
        self.proposals = [
            tuple(next(rest) if token == PENDING_TOKEN else token for token in mine)
            for mine in self.proposals
        ]

    def pending(self, token_ids: mx.array) -> mx.array | None:
        """Last input token of every sampled row, if any row's is pending: int32 ``[rows]``."""
        if not self.has_pending:
            return None
        return token_ids[mx.array(self._ends)]
