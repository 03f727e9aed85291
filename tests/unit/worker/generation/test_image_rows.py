"""Rows of an image stand in place of tokens, but marks between them stay tokens."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models.vision.features import Features
from mlx_parallm.types.model_input import FEATURE, InputRows
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.inputs.rows import EmbeddingSeam, InputFeatures
from mlx_parallm.worker.generation.inputs.runs import over_span

VOCAB, WIDTH, MARK = 5, 2, 3


class Run:
    """A run of towers, which nothing drops here."""

    def drop(self) -> None:
        pass


@pytest.mark.parametrize("first_row", [0, 1])
def test_marks_between_rows_stay_tokens_which_adapters_may_change(first_row: int) -> None:
    span = mx.array([FEATURE, MARK, FEATURE])
    made = over_span(Features(mx.array([[1.0] * WIDTH, [2.0] * WIDTH])), span, mx.float32)
    run, features = Run(), InputFeatures()
    features.expect([0], run)
    features.put(0, run, made.rows, is_feature=np.array(span) == FEATURE)
    rows = InputRows(slot=0, first_row=first_row, num_rows=3 - first_row, offset=1)
    token_ids = (1, *[4, MARK, 4][first_row:], 2)
    step = [
        ScheduledSequence(
            seq_id=0, slot=0, start=0, token_ids=token_ids, block_table=(0,), inputs=(rows,)
        )
    ]
    table = nn.Embedding(VOCAB, WIDTH)
    table.weight = mx.repeat(10.0 * mx.arange(VOCAB)[:, None], WIDTH, axis=1)
    seam, gathered = EmbeddingSeam(table, WIDTH), features.gather(step)
    assert gathered is not None
    with seam.during(gathered):
        embedded = table(seam.place(mx.array(token_ids), step, features))
    assert embedded[:, 0].tolist() == [10, *[1, 10 * MARK, 2][first_row:], 20]
