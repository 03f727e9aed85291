"""The head of a model is looked for in stages, and first where models have it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3

from mlx_parallm.worker.generation.row_selection import RowSelector, row_selection
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


class RoundedLinear(nn.Linear):
    """A layer whose results of one row differ by a rounding from those of several, as on a GPU."""

    def __call__(self, x: mx.array) -> mx.array:
        result = super().__call__(x)
        return result * (1 + mx.finfo(x.dtype).eps) if len(x) == 1 else result


class SwappedLinear(nn.Linear):
    """A layer that computes another row than it is given if it is given one."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x[..., ::-1] if len(x) == 1 else x)


def selector_of(head: type[nn.Linear], dtype: mx.Dtype) -> RowSelector:
    model = model_of(tied=False)
    model.lm_head = head(ROWS, ROWS, bias=False)
    model.set_dtype(dtype)
    return Stages(row_selection(model, ROWS)).wait()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_a_rounding_of_logits_hides_no_head(dtype: mx.Dtype) -> None:
    assert selector_of(RoundedLinear, dtype).active


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_wrong_logits_are_no_head(dtype: mx.Dtype, caplog: pytest.LogCaptureFixture) -> None:
    assert not selector_of(SwappedLinear, dtype).active
    assert "The LM head of this model could not be found" in caplog.text
