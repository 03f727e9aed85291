"""The head of a model is looked for in stages, and first where models have it."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import qwen3

from mlx_parallm.worker.generation.row_selection import row_selection
from mlx_parallm.worker.ops import Stages
from tests.builders.architectures.configs import config_of

ROWS = 64


def model_of(*, tied: bool) -> qwen3.Model:
    """Return a model whose layers have as many rows as its head."""
    shape = {"vocab_size": ROWS, "hidden_size": ROWS, "num_hidden_layers": 3}
    config = config_of("qwen3") | shape | {"tie_word_embeddings": tied}
    return qwen3.Model(qwen3.ModelArgs.from_dict(config))


def test_the_head_is_found_before_layers_of_as_many_rows() -> None:
    model = model_of(tied=False)
    selecting = Stages(row_selection(model, ROWS))
    selecting.advance()
    assert selecting.num_stages == 1
    selector = selecting.wait()
    assert selector.active
    selector.rows = mx.array([1])
    assert model.lm_head(mx.zeros((2, 1, ROWS))).shape == (1, 1, ROWS)


def test_each_layer_that_is_no_head_is_a_stage() -> None:
    model = model_of(tied=True)
    selecting = Stages(row_selection(model, ROWS))
    selecting.advance()
    assert selecting.num_stages > 1
    selector = selecting.wait()
    again = Stages(row_selection(model_of(tied=True), ROWS, chosen=selector.head)).wait()
    assert (selector.active, again.head) == (True, selector.head)
