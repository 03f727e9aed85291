"""Lets only the rows that need logits through the LM head.

The head of an mlx_lm model is a linear layer or a tied embedding somewhere below the model. Its
instance gets a class that picks rows before it multiplies; names of parameters stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.model_errors import MODEL_ERRORS

EmbeddingTable = nn.Embedding | nn.QuantizedEmbedding


class RowSelector:
    """Which rows the LM head computes; None for all."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.active = False

    def run(self, forward: Callable[[], mx.array], wanted: mx.array) -> mx.array:
        """Logits of the wanted rows of a packed forward, ``[len(wanted), vocab]``."""
        if not self.active:
            return forward()[wanted, 0]
        self.rows = wanted
        try:
            return forward()[:, 0]
        finally:
            self.rows = None

    def pick(self, hidden: mx.array) -> mx.array:
        """Rows of ``[..., size]`` counted over all leading axes, as ``[rows, 1, size]``."""
        if self.rows is None:
            return hidden
        return hidden.reshape(-1, hidden.shape[-1])[self.rows][:, None]


def install_row_selection(model: nn.Module, vocab_size: int) -> RowSelector:
    """Give the model's head a row selector; inactive if no head could be found.

    The model is run on two tokens to see that the selector is honoured and changes nothing else.
    """
    selector = RowSelector()
    # The head comes last; a layer inside may happen to have as many rows as the vocabulary.
    for module, method in reversed(_head_candidates(model, vocab_size)):
        calls = WrappedCalls([module], partial(_selecting, method=method, selector=selector))
        if _honours(model, selector):
            selector.active = True
            return selector
        calls.remove()
    return selector


def embedding_rows(model: nn.Module, vocab_size: int | None) -> int | None:
    """Rows of the token embedding: ids from it on are out of range. None if there is no embedding.

    ``vocab_size`` is what the config says; it tells the token embedding from one of positions.
    """
    rows = [
        int(module.weight.shape[0])
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
    ]
    fitting = [count for count in rows if count >= (vocab_size or 0)]
    return min(fitting, default=None)


def embedding_tables(model: nn.Module, vocab_size: int) -> list[EmbeddingTable]:
    """Return the embeddings with a row for each of ``vocab_size`` ids, in the model's order."""
    return [
        module
        for module in model.modules()
        if isinstance(module, EmbeddingTable) and module.weight.shape[0] == vocab_size
    ]


def _head_candidates(model: nn.Module, vocab_size: int) -> list[tuple[nn.Module, str]]:
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

    return {method: selected}


def _honours(model: Any, selector: RowSelector) -> bool:
    tokens = mx.array([[0], [1]])
    whole = model(tokens)
    selector.rows = mx.array([1])
    try:
        part = model(tokens)
    except MODEL_ERRORS:
        return False
    else:
        return part.shape == (1, *whole.shape[1:]) and bool(
            mx.allclose(part[0], whole[1], rtol=1e-3, atol=1e-3)
        )
    finally:
        selector.rows = None
