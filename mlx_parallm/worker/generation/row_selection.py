"""Runs the LM head for only the rows that need logits.

The head of an mlx_lm model is a linear layer or a tied embedding somewhere below the model. Its
calls are wrapped, so that it selects rows before it multiplies; names of parameters stay.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.checkpoints.encoder_decoders import target_vocab_size
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.ranks import Ranks, agreed
from mlx_parallm.worker.layers.row_layers import SELECTED_ROWS, picked_rows
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import LoadedModel

#: NO_HEAD: the number of no module.
NO_HEAD = -1
# MAX_ERROR is in parts of the largest logit: a GPU adds up the product of one row in another order
# than that of two, and 16-bit logits are rounded to 8 bits or more.
MAX_ERROR = 0.02
EmbeddingTable = nn.Embedding | nn.QuantizedEmbedding


class RowSelector:
    """Selects the rows that the LM head computes.

    Attributes:
        rows: indices of the rows; None for all rows.
        head: the number of the module that asks this object; see ``row_selection``.
    """

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.head = NO_HEAD
        self._noted: list[mx.array] | None = None

    @property
    def active(self) -> bool:
        """True if the model's head asks this object."""
        return self.head != NO_HEAD

    def run(self, forward: Callable[[], mx.array], rows: mx.array) -> mx.array:
        """Return the logits of some rows of a packed forward, ``[len(rows), vocab]``.

        ``forward`` returns logits ``[T, 1, vocab]``, and ``rows`` are int32 indices into them.
        """
        if not self.active:
            return forward()[rows, 0]
        self.rows = rows
        try:
            return forward()[:, 0]
        finally:
            self.rows = None

    def pick(self, hidden: mx.array) -> mx.array:
        """Return the selected rows of ``[..., size]`` as ``[rows, 1, size]``.

        Indices count over all leading axes. Without a selection the input is returned as it is.
        """
        if self.rows is not None:
            hidden = picked_rows(hidden, self.rows)
        self.note([hidden])
        return hidden

    @contextmanager
    def noting(self) -> Iterator[list[mx.array]]:
        """Yield a list that gets what the head reads, ``[..., size]``, one array for each call."""
        before, self._noted = self._noted, []
        try:
            yield self._noted
        finally:
            self._noted = before

    def note(self, hidden: Sequence[mx.array]) -> None:
        """Add what the head read in a forward that was repeated without calling it."""
        if self._noted is not None:
            self._noted += hidden


def row_selection(
    model: nn.Module, vocab_size: int, ranks: Ranks | None = None, chosen: int | None = None
) -> Generator[None, None, RowSelector]:
    """Return a row selector for the model's head; it is inactive if no head could be found.

    The model is run on two tokens to check that the selector works and changes nothing else, a
    stage for each module that may be the head; ``ranks`` that compute the model together must all
    find so. ``chosen`` is the number of an earlier choice for an equal model, which is not checked
    again.
    """
    selector = RowSelector()
    candidates = _head_candidates(model, vocab_size)
    # MLX visits the last module first, and the head is the last: a layer before it may have as many
    # rows by chance. Numbers count from the first.
    for later, (module, method) in enumerate(candidates, 1):
        number = len(candidates) - later
        if chosen not in (None, number):
            continue
        calls = WrappedCalls([module], partial(_selecting, method=method, selector=selector))
        if chosen is not None or agreed(ranks, _works(model, selector)):
            selector.head = number
            return selector
        calls.remove()
        yield
    return selector


#: ``install_row_selection``: ``row_selection`` without stages.
install_row_selection = at_once(row_selection)


def embedding_rows(model: nn.Module, vocab_size: int | None) -> int | None:
    """Return the number of rows of the token embedding; None if there is no embedding.

    Ids from this number on are out of range. ``vocab_size`` is that of the config, which
    distinguishes the token embedding from one of positions.
    """
    row_counts = [
        int(module.weight.shape[0])
        for module in model.modules()
        # Packed embeddings of mlx_lm's own are none of MLX's classes.
        if hasattr(module, "as_linear")
    ]
    return min((count for count in row_counts if count >= (vocab_size or 0)), default=None)


def vocab_size_of(loaded: LoadedModel) -> int:
    """Return the number of token ids that a model writes, the rows of its token embedding.

    Raises:
        ModelLoadError: the model has no embedding.
    """
    named = target_vocab_size(loaded.config) or getattr(loaded.model.args, "vocab_size", None)
    vocab_size = embedding_rows(loaded.model, named)
    if vocab_size is None:
        raise ModelLoadError(f"{loaded.path} has no embedding table.")
    return vocab_size


def embedding_tables(model: nn.Module, vocab_size: int) -> list[EmbeddingTable]:
    """Return the embeddings with a row for each of ``vocab_size`` ids, in the model's order."""
    return [
        module
        for module in model.modules()
        if isinstance(module, EmbeddingTable) and module.weight.shape[0] == vocab_size
    ]


def _head_candidates(model: nn.Module, vocab_size: int) -> list[tuple[nn.Module, str]]:
    """Return the modules that may be the head, each with the method that computes logits."""
    linear = (nn.Linear, nn.QuantizedLinear)
    tied = (nn.Embedding, nn.QuantizedEmbedding)
    candidates: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, tied) and module.weight.shape[0] == vocab_size:
            candidates.append((module, "as_linear"))
        if isinstance(module, linear) and module.weight.shape[0] == vocab_size:
            candidates.append((module, "__call__"))
    return candidates


def _selecting(original: type, *, method: str, selector: RowSelector) -> Methods:
    def selected(self: Any, hidden: mx.array) -> mx.array:
        return getattr(original, method)(self, selector.pick(hidden))

    return {method: selected, SELECTED_ROWS: lambda _: selector.rows}


def _works(model: Any, selector: RowSelector) -> bool:
    """True if the model with a selection returns the logits of the selected row alone."""
    tokens = mx.array([[0], [1]])
    whole = model(tokens)
    # Ranks must add up both forwards in the same order.
    mx.eval(whole)
    selector.rows = mx.array([1])
    try:
        part = model(tokens)
    except MODEL_ERRORS:
        return False
    else:
        return part.shape == (1, *whole.shape[1:]) and _agree(part[0], whole[1])
    finally:
        selector.rows = None


def _agree(part: mx.array, whole: mx.array) -> bool:
    """True if logits differ by roundings alone; some models mask tokens by infinite ones."""
    part, whole = part.astype(mx.float32), whole.astype(mx.float32)
    is_finite = mx.isfinite(whole)
    is_masked_alike = mx.where(is_finite, mx.isfinite(part), part == whole).all()
    error = mx.where(is_finite, mx.abs(part - whole), 0).max()
    # Weights that come later are zeros until then, and so are their logits.
    largest = mx.where(is_finite, mx.abs(whole), 0).max()
    return bool(is_masked_alike.item()) and bool((error <= MAX_ERROR * largest).item())
