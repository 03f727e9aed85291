"""Rows of features are added to the hidden states of their own places, layer by layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.types.model_input import InputRows
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.inputs.forward import DeepstackSeam
from mlx_parallm.worker.generation.inputs.rows import EmbeddingSeam, InputFeatures

VOCAB, WIDTH = 5, 2


class Layer(nn.Module):
    """A layer that returns its input."""

    def __call__(self, x: mx.array) -> mx.array:
        return x


def forward(table: nn.Embedding, layers: list[Layer], ids: mx.array) -> list[Any]:
    """Return the hidden states after each layer."""
    hidden, states = table(ids), []
    for layer in layers:
        hidden = layer(hidden)
        states.append(hidden[..., 0].tolist())
    return states


def sequence(*rows: InputRows) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=0, slot=0, start=0, token_ids=(0,) * 4, block_table=(0,), inputs=rows
    )


class Run:
    """A run of towers, which nothing drops here."""

    def drop(self) -> None:
        pass


def put(features: InputFeatures, slot: int, rows: mx.array, layers: mx.array | None = None) -> None:
    run = Run()
    features.expect([slot], run)
    features.put(slot, run, rows, layers=layers)


def rows_of(slot: int, first_row: int, num_rows: int) -> InputRows:
    return InputRows(slot=slot, first_row=first_row, num_rows=num_rows, offset=0)


def test_rows_are_added_after_the_first_layers_only() -> None:
    table, layers = nn.Embedding(VOCAB, WIDTH), [Layer(), Layer(), Layer()]
    table.weight = mx.zeros((VOCAB, WIDTH))
    seam, deepstack = EmbeddingSeam(table, WIDTH), DeepstackSeam(layers)
    added = mx.array([[[1.0] * WIDTH, [2.0] * WIDTH], [[10.0] * WIDTH, [20.0] * WIDTH]])
    for ids in (mx.array([[0, VOCAB, 1, VOCAB + 1]]), mx.array([[0], [VOCAB], [1], [VOCAB + 1]])):
        with seam.during(mx.zeros((2, WIDTH))) as placed, deepstack.during(placed, added):
            states = forward(table, layers, ids)
        flat = [mx.array(state).reshape(-1).tolist() for state in states]
        assert flat == [[0, 1, 0, 2], [0, 11, 0, 22], [0, 11, 0, 22]]
    assert all(type(layer) is Layer for layer in layers)


def test_inputs_without_rows_for_layers_add_nothing() -> None:
    features = InputFeatures()
    put(features, 0, mx.zeros((3, WIDTH)), mx.arange(6.0).reshape(1, 3, WIDTH))
    put(features, 1, mx.zeros((2, WIDTH)))
    assert features.gather_layers([sequence(rows_of(1, 0, 2))]) is None
    gathered = features.gather_layers([sequence(rows_of(1, 0, 1)), sequence(rows_of(0, 1, 2))])
    assert gathered is not None
    assert gathered.tolist() == [[[0, 0], [2, 3], [4, 5]]]


def test_dropped_inputs_leave_no_rows() -> None:
    features = InputFeatures()
    put(features, 0, mx.zeros((1, WIDTH)), mx.ones((1, 1, WIDTH)))
    put(features, 0, mx.zeros((1, WIDTH)))
    assert features.gather_layers([sequence(rows_of(0, 0, 1))]) is None
