"""The forward of a step of decode rows and rows with proposals as one compiled function.

Rows of several tokens would give every step another shape, and the device prepares itself anew for
each. So all rows are padded to one number of tokens in the layers with states, which are the only
ones to see sequences; elsewhere every token is a row. The states after the tokens that count are
made of what the layers noted, when the next step reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.shape_buckets import padded_rows
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.paths.base import adapter_slots
from mlx_parallm.worker.generation.paths.compiled_decode import CompiledDecode
from mlx_parallm.worker.generation.state_store import KeptStates, States, UnknownStateError
from mlx_parallm.worker.generation.step_rows import single_rows
from mlx_parallm.worker.layers.kept_states import StateSource

# LENGTHS: rows are padded to one of these numbers of tokens; rows with more are not compiled.
LENGTHS = (3, 5, 9, 17)


def is_verifying(sequences: Sequence[ScheduledSequence], rows: Sequence[int]) -> bool:
    """True if all sequences decode, with proposals or without, and all tokens need logits."""
    return len(rows) == sum(len(row.token_ids) for row in sequences) and all(
        len(row.token_ids) == 1 + len(row.verify) <= LENGTHS[-1]
        and row.start > 0
        and not row.inputs
        for row in sequences
    )


class CompiledProposals(CompiledDecode):
    """Compiles a forward for steps with proposals. See ``CompiledDecode``."""

    #: What states are made of, by cache and entry; the same for all shapes.
    _sources: list[list[StateSource]]
    _within: Callable[[], AbstractContextManager[None]]

    def forget(self) -> None:
        """Drop the traces, because weights were replaced."""
        super().forget()
        self._restored = mx.compile(self._restore)

    def learn_from(self, other: CompiledDecode) -> None:
        """Note what the layers ask of a plan, as the function of decode rows has learnt it."""
        self._kinds, self._gathered = other._kinds, other._gathered

    def learn_sources(
        self, kept: KeptStates, within: Callable[[], AbstractContextManager[None]]
    ) -> list[list[list[mx.array]]]:
        """Note what states are made of, and return the arrays, by cache and entry.

        Args:
            kept: what the layers of a traced forward noted.
            within: returns the context in which layers use the kernels that steps use.

        Raises:
            UnknownStateError: it is not known, or not for rows of several lengths.
        """
        sources = [[each for each in entries if each] for entries in kept.sources]
        is_known = all(None not in entries for entries in kept.sources)
        if not is_known or not all(each.takes_rows for entries in sources for each in entries):
            raise UnknownStateError("the states after some of a row's tokens are not known")
        self._sources, self._within = sources, within
        return [[list(each.arrays) for each in entries] for entries in sources]

    def verified(self, sequences: Sequence[ScheduledSequence], token_ids: mx.array) -> mx.array:
        """Return the logits after all tokens of sequences, ``[T, vocab]``; keep their states.

        ``token_ids`` are their tokens, int32 ``[T]``.
        """
        lengths = np.array([len(sequence.token_ids) for sequence in sequences])
        length = next(each for each in LENGTHS if each >= lengths.max())
        num_rows = padded_rows(len(sequences))
        taken, packed = _places(lengths, num_rows, length)
        start = self._states.fetch([sequence.slot for sequence in sequences], num_rows)
        rows = [row for sequence in sequences for row in single_rows(sequence)]
        places: Any = [mx.array(taken), mx.array(packed)]
        logits, made_of = self.run(
            rows, token_ids, adapter_slots(rows), packed.size, [*start, places]
        )

        def make(counts: Sequence[int]) -> States:
            with self._within():
                return self._restored(made_of, mx.array(list(counts)))

        self._states.commit_rows(sequences, make, num_rows, length)
        return logits

    def _restore(self, made_of: list[list[list[mx.array]]], counts: mx.array) -> States:
        """Return the states after so many tokens of each row, int32 ``[B]``."""
        return [
            [each.make(arrays, counts) for each, arrays in zip(entries, own, strict=True)]
            for entries, own in zip(self._sources, made_of, strict=True)
        ]


def _places(lengths: np.ndarray, num_rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which row each token of a group is, and which token of the group each row is.

    Args:
        lengths: the number of tokens of each sequence, int ``[sequences]``.
        num_rows: the group's number B of sequences, with padding.
        length: the group's number L of tokens of each.

    Returns:
        int32 ``[B, L]``, tokens beyond a sequence's own being its last; and int32 ``[B * L]``, rows
        of padding being the first token.
    """
    ends = lengths.cumsum()
    taken = np.zeros((num_rows, length), dtype=np.int32)
    places = np.minimum(np.arange(length), lengths[:, None] - 1)
    taken[: len(lengths)] = (ends - lengths)[:, None] + places
    packed = np.zeros(num_rows * length, dtype=np.int32)
    offsets = np.arange(len(lengths)) * length - (ends - lengths)
    packed[: ends[-1]] = np.arange(ends[-1]) + offsets.repeat(lengths)
    return taken, packed
