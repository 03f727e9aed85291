"""Puts the rows of inputs besides tokens in place of token embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.vision.features import TwoWay
from mlx_parallm.types.model_input import InputRows
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.dense import TwoWaySpan
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.ranks import Ranks, agreed
from mlx_parallm.worker.generation.row_selection import embedding_tables
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls


class PlacedRows:
    """Where the rows of a step's features are in a forward, once its embedding has run."""

    def __init__(self) -> None:
        self._is_row = mx.array([False])
        self._indices = mx.array([0])

    def place(self, is_row: mx.array, indices: mx.array) -> None:
        """Take where the features are: ``is_row`` and the index of each, of the ids' shape."""
        self._is_row, self._indices = is_row, indices

    def spread(self, rows: mx.array) -> mx.array:
        """Return ``rows``, one for each feature, at their places: ``[*ids, width]``, or zeros."""
        return mx.where(self._is_row[..., None], rows[self._indices], mx.array(0, rows.dtype))


class EmbeddingSeam:
    """Replaces the embeddings of token ids beyond the vocabulary by rows of a step's features.

    Id ``first_id + k`` stands for row ``k``. These ids pass through a forward as token ids do, so
    that no path (packed, split, sequential, alone) needs to know of them.

    Attributes:
        width: the number of numbers in a row.
        first_id: the first id that the embedding table does not have.
        needs_tokens: True if the model looks ids up in further tables, so that rows alone do not
            say what a position means. Features of images count as padding there.
    """

    def __init__(
        self, table: Any, width: int, *, others: Sequence[Any] = (), padding_id: int = 0
    ) -> None:
        """Prepare.

        Args:
            table: the model's ``nn.Embedding`` or ``nn.QuantizedEmbedding``.
            width: see the class.
            others: further tables that the model looks ids up in.
            padding_id: the id that these are asked for in place of a row's.
        """
        self._table = table
        self._others = others
        self._padding_id = padding_id
        self.width = width
        self.first_id = int(table.weight.shape[0])
        self.needs_tokens = bool(others)

    def rows(self, token_ids: mx.array) -> mx.array:
        """Return the embeddings of token ids, ``[ids, width]``."""
        return self._table(token_ids)

    @contextmanager
    def during(self, features: mx.array) -> Iterator[PlacedRows]:
        """Replace ids beyond the table by rows of ``features``, ``[rows, width]``, for a while."""
        first_id = self.first_id
        placed = PlacedRows()

        def wrap(original: Any) -> Methods:
            def replaced(self: Any, token_ids: mx.array) -> mx.array:
                is_row = token_ids >= first_id
                embedded = original.__call__(self, mx.where(is_row, 0, token_ids))
                indices = mx.where(is_row, token_ids - first_id, 0)
                placed.place(is_row, indices)
                rows = features.astype(embedded.dtype)[indices]
                return mx.where(is_row[..., None], rows, embedded)

            return {"__call__": replaced}

        with WrappedCalls([self._table], wrap), self.padded_from(first_id):
            yield placed

    @contextmanager
    def padded_from(self, first_id: int) -> Iterator[None]:
        """Let the other tables take ids from ``first_id`` on as padding, for a while."""
        padding_id = self._padding_id

        def wrap(original: Any) -> Methods:
            def padded(self: Any, token_ids: mx.array) -> mx.array:
                return original.__call__(
                    self, mx.where(token_ids >= first_id, padding_id, token_ids)
                )

            return {"__call__": padded}

        with WrappedCalls(self._others, wrap):
            yield

    def place(
        self,
        token_ids: mx.array,
        sequences: Sequence[ScheduledSequence],
        features: InputFeatures,
    ) -> mx.array:
        """Return the step's ids, int32 ``[T]``, with the ids of input rows put in.

        The k-th row of all inputs of the sequences, in order, has id ``first_id + k``, unless it is
        a token.
        """
        is_row, is_feature = np.zeros((2, token_ids.size), bool)
        first = 0
        for sequence in sequences:
            for rows in sequence.inputs:
                start = first + rows.offset
                is_row[start : start + rows.num_rows] = True
                is_feature[start : start + rows.num_rows] = features.is_feature(rows)
            first += len(sequence.token_ids)
        ids = np.where(is_feature, self.first_id + np.cumsum(is_row) - 1, 0).astype(np.int32)
        return mx.where(mx.array(is_feature), mx.array(ids), token_ids)


class Droppable(Protocol):
    """A run that computes features for some slots."""

    def drop(self) -> None:
        """Free what was computed so far."""
        ...


class InputFeatures:
    """The features of inputs on the device, by slot."""

    def __init__(self) -> None:
        self._expected: dict[int, Droppable] = {}
        self._rows: dict[int, mx.array] = {}
        self._layers: dict[int, mx.array] = {}
        self._positions: dict[int, np.ndarray] = {}
        self._two_way: dict[int, TwoWay] = {}
        self._is_feature: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._expected.keys() | self._rows.keys())

    def expect(self, slots: Sequence[int], run: Droppable) -> None:
        """Drop what is in these slots, because ``run`` will put features there."""
        self.drop(slots)
        self._expected.update(dict.fromkeys(slots, run))

    def put(
        self,
        slot: int,
        run: Droppable,
        rows: mx.array,
        positions: np.ndarray | None = None,
        *,
        layers: mx.array | None = None,
        two_way: TwoWay | None = None,
        is_feature: np.ndarray | None = None,
    ) -> None:
        """Keep an input's features, unless its slot was dropped since the run began.

        Args:
            slot: where steps find them.
            run: computed them.
            rows: ``[rows, width]``.
            positions: their position ids, int32 ``[rows, axes]``, see ``model_input.POSITIONS``.
            layers: what the first text layers add to these rows, ``[layers, rows, width]``.
            two_way: where the rows attend to later ones; None if nowhere.
            is_feature: False where a row is a token, such as a mark between rows of patches, bool
                ``[rows]``; None if none is.
        """
        if self._expected.get(slot) is not run:
            return
        self.drop([slot])
        self._rows[slot] = rows
        if layers is not None:
            self._layers[slot] = layers
        if positions is not None:
            self._positions[slot] = positions
        if two_way is not None:
            self._two_way[slot] = two_way
        if is_feature is not None:
            self._is_feature[slot] = is_feature

    def positions(self, rows: InputRows) -> np.ndarray | None:
        """Return the position ids of some rows, ``[rows, axes]``; None if they are places."""
        ids = self._positions.get(rows.slot)
        return None if ids is None else ids[rows.first_row : rows.first_row + rows.num_rows]

    def is_feature(self, rows: InputRows) -> np.ndarray | bool:
        """Return which of some rows are not tokens, bool ``[rows]``; True if all are not."""
        kept = self._is_feature.get(rows.slot)
        return True if kept is None else kept[rows.first_row : rows.first_row + rows.num_rows]

    def two_way_spans(self, sequences: Sequence[ScheduledSequence]) -> list[TwoWaySpan]:
        """Return the rows of a step that attend to each other."""
        spans: list[TwoWaySpan] = []
        first = 0
        for sequence in sequences:
            for rows in sequence.inputs:
                if rows.slot in self._two_way:
                    position = sequence.start + rows.offset
                    span = TwoWaySpan(
                        row=first + rows.offset,
                        num_rows=rows.num_rows,
                        position=position,
                        start=position - rows.first_row,
                        blocks=sequence.block_table,
                        two_way=self._two_way[rows.slot],
                    )
                    spans.append(span)
            first += len(sequence.token_ids)
        return spans

    def drop(self, slots: Sequence[int]) -> None:
        """Drop the features in some slots, or what will be put there; others are ignored."""
        for slot in slots:
            self._expected.pop(slot, None)
            self._rows.pop(slot, None)
            self._layers.pop(slot, None)
            self._positions.pop(slot, None)
            self._two_way.pop(slot, None)
            self._is_feature.pop(slot, None)

    def clear(self) -> None:
        """Drop all features, and all that is being computed."""
        for run in self._expected.values():
            run.drop()
        self._expected.clear()
        self._rows.clear()
        self._layers.clear()
        self._positions.clear()
        self._two_way.clear()
        self._is_feature.clear()

    def gather(self, sequences: Sequence[ScheduledSequence]) -> mx.array | None:
        """Return the rows of inputs in a step, in order, ``[rows, width]``; None if it has none."""
        parts = [
            self._rows[rows.slot][rows.first_row : rows.first_row + rows.num_rows]
            for sequence in sequences
            for rows in sequence.inputs
        ]
        return mx.concatenate(parts) if parts else None

    def gather_layers(self, sequences: Sequence[ScheduledSequence]) -> mx.array | None:
        """Return what the first text layers add to the rows that ``gather`` returns.

        Returns:
            ``[layers, rows, width]``; None if they add nothing.
        """
        steps = [rows for sequence in sequences for rows in sequence.inputs]
        kept = [self._layers[rows.slot] for rows in steps if rows.slot in self._layers]
        if not kept:
            return None
        count, _, width = kept[0].shape
        parts = [
            self._layers[rows.slot][:, rows.first_row : rows.first_row + rows.num_rows]
            if rows.slot in self._layers
            else mx.zeros((count, rows.num_rows, width), kept[0].dtype)
            for rows in steps
        ]
        return mx.concatenate(parts, axis=1)


class ImageTokens(NamedTuple):
    """The token ids of images in the text model of a tower.

    Attributes:
        width: the text model's own width.
        padding_id: the id that further tables are asked for in place of a row's.
    """

    width: int
    padding_id: int


def find_embedding(
    model: nn.Module,
    vocab_size: int,
    dtype: mx.Dtype,
    images: ImageTokens | None = None,
    ranks: Ranks | None = None,
) -> EmbeddingSeam | None:
    """Return the seam of the model's token embedding; None if rows cannot replace tokens.

    Each table is tried: two tokens must give the same logits by their ids and by their embeddings.
    They do not in models that look ids up in further tables, as Gemma 3n and small models of
    Gemma 4 do in each layer.

    Args:
        model: the model.
        vocab_size: rows of its token embedding.
        dtype: of the model.
        images: of a model with a tower; others take no rows if they have further tables.
        ranks: the processes that compute the model together and must find the same; None if there
            is this one alone.
    """
    tables = embedding_tables(model, vocab_size)
    for table in tables:
        others = [other for other in tables if other is not table]
        tokens = mx.array([[1, 2]])
        try:
            rows = table(tokens)[0]
            width = int(rows.shape[-1])
            seams = [EmbeddingSeam(table, width)]
            if images is not None and others and width == images.width:
                padded = EmbeddingSeam(table, width, others=others, padding_id=images.padding_id)
                seams.append(padded)
            for seam in seams:
                if _replaces(model, seam, rows.astype(dtype), tokens, ranks):
                    return seam
        except MODEL_ERRORS:
            continue
    return None


def _replaces(
    model: Any, seam: EmbeddingSeam, rows: mx.array, tokens: mx.array, ranks: Ranks | None
) -> bool:
    """True if the tokens' own rows give their logits, and swapped rows give other logits."""
    with seam.padded_from(0):
        expected = model(tokens)
        # Ranks must add up the forwards in the same order.
        mx.eval(expected)
    ids = mx.arange(tokens.size).reshape(tokens.shape) + seam.first_id

    def is_expected(features: mx.array) -> bool:
        with seam.during(features):
            is_close = bool(mx.allclose(model(ids), expected, rtol=1e-3, atol=1e-3))
        return agreed(ranks, is_close)

    return is_expected(rows) and not is_expected(rows[::-1])
