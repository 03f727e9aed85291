"""Rows of inputs in place of the embeddings of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.row_selection import embedding_tables
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.model_errors import MODEL_ERRORS


class EmbeddingSeam:
    """Gives a model rows of its own choice where token ids lie beyond its vocabulary.

    Id ``first_id + k`` stands for row ``k`` of the step's features. Such ids go wherever token ids
    go in a forward, so that every path (packed, split, one sequence after another) stays as it is.

    Attributes:
        width: numbers per row.
        first_id: the first id that the embedding table does not have.
    """

    def __init__(self, table: Any, width: int) -> None:
        """``table`` is the ``nn.Embedding``, or the quantised one, whose output is replaced."""
        self._table = table
        self.width = width
        self.first_id = int(table.weight.shape[0])

    @contextmanager
    def during(self, features: mx.array) -> Iterator[None]:
        """Let ids beyond the table mean rows of ``features``, ``[rows, width]``."""
        first_id = self.first_id

        def wrap(original: Any) -> Methods:
            def replaced(self: Any, token_ids: mx.array) -> mx.array:
                is_row = token_ids >= first_id
                embedded = original.__call__(self, mx.where(is_row, 0, token_ids))
                places = mx.where(is_row, token_ids - first_id, 0)
                rows = features.astype(embedded.dtype)[places]
                return mx.where(is_row[..., None], rows, embedded)

            return {"__call__": replaced}

        with WrappedCalls([self._table], wrap):
            yield

    def place(self, token_ids: mx.array, sequences: Sequence[ScheduledSequence]) -> mx.array:
        """Return the step's ids, int32 ``[T]``, with those of its input rows in their places.

        Row ``k`` is the k-th row of all inputs of the sequences, in order.
        """
        is_row = np.zeros(token_ids.size, bool)
        first = 0
        for sequence in sequences:
            for rows in sequence.inputs:
                start = first + rows.offset
                is_row[start : start + rows.num_rows] = True
            first += len(sequence.token_ids)
        ids = np.where(is_row, self.first_id + np.cumsum(is_row) - 1, 0).astype(np.int32)
        return mx.where(mx.array(is_row), mx.array(ids), token_ids)


class InputFeatures:
    """The products of inputs on the device, by slot."""

    def __init__(self) -> None:
        self._rows: dict[int, mx.array] = {}

    def put(self, slot: int, rows: mx.array) -> None:
        """Keep a product, ``[rows, width]``."""
        self._rows[slot] = rows

    def drop(self, slots: Sequence[int]) -> None:
        """Forget products; unknown slots are ignored."""
        for slot in slots:
            self._rows.pop(slot, None)

    def clear(self) -> None:
        """Forget all products."""
        self._rows.clear()

    def gather(self, sequences: Sequence[ScheduledSequence]) -> mx.array | None:
        """Return the rows that a step runs, in order, ``[rows, width]``; None if it has none."""
        parts = [
            self._rows[rows.slot][rows.first_row : rows.first_row + rows.num_rows]
            for sequence in sequences
            for rows in sequence.inputs
        ]
        return mx.concatenate(parts) if parts else None


def find_embedding(model: nn.Module, vocab_size: int, dtype: mx.Dtype) -> EmbeddingSeam | None:
    """Return the seam of the model's token embedding; None if rows cannot stand for tokens.

    Each table is tried: two tokens must give the same logits as ids and as their rows. Models that
    look ids up in further tables (as Gemma 3n does in each layer) give others.
    """
    for table in embedding_tables(model, vocab_size):
        tokens = mx.array([[1, 2]])
        try:
            rows = table(tokens)[0]
            seam = EmbeddingSeam(table, int(rows.shape[-1]))
            if _replaces(model, seam, rows.astype(dtype), tokens):
                return seam
        except MODEL_ERRORS:
            continue
    return None


def _replaces(model: Any, seam: EmbeddingSeam, rows: mx.array, tokens: mx.array) -> bool:
    expected = model(tokens)
    places = mx.arange(tokens.size).reshape(tokens.shape)
    with seam.during(rows):
        got = model(places + seam.first_id)
        mx.eval(got)
    changed = rows[::-1]
    with seam.during(changed):
        other = model(places + seam.first_id)
        mx.eval(other)
    same = bool(mx.allclose(got, expected, rtol=1e-3, atol=1e-3))
    return same and not bool(mx.allclose(other, expected, rtol=1e-3, atol=1e-3))
