"""The head of a model is looked for in stages, and first where models have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3

from benchmarks.architectures import names
from mlx_parallm.worker.generation.row_selection import RowSelector, embedding_rows, row_selection
from mlx_parallm.worker.ops import Stages
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build

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


def rounded(method: Callable[[Any, mx.array], mx.array]) -> Callable[[Any, mx.array], mx.array]:
    """Return a layer's method whose results of one row differ from those of several, as on a GPU.

    They are off by a bit of bfloat16, up or down.
    """

    def call(self: Any, x: mx.array) -> mx.array:
        result = method(self, x)
        if x.size != x.shape[-1]:
            return result
        bits = mx.arange(result.shape[-1]) % 3 - 1
        return (result.astype(mx.float32) * (1 + bits * 2**-8)).astype(result.dtype)

    return call


class RoundedLinear(nn.Linear):
    """A layer whose results of one row are rounded otherwise."""

    def __call__(self, x: mx.array) -> mx.array:
        return rounded(nn.Linear.__call__)(self, x)


class SwappedLinear(nn.Linear):
    """A layer that computes another row than it is given if it is given one."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x[..., ::-1] if len(x) == 1 else x)


class MaskingLinear(RoundedLinear):
    """A head that masks tokens, as that of Phi-3 small does."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.where(mx.arange(ROWS) % 5 == 0, -mx.inf, super().__call__(x))


class OtherMaskLinear(nn.Linear):
    """A head that masks others of the tokens of one row."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.where(mx.arange(ROWS) % 5 == len(x), -mx.inf, super().__call__(x))


class NanLinear(nn.Linear):
    """A head whose logits of one row are no numbers."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) * (mx.nan if len(x) == 1 else 1)


class LaterLinear(nn.Linear):
    """A head whose weights come later."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) * 0


def selector_of(head: type[nn.Linear], dtype: mx.Dtype) -> RowSelector:
    model = model_of(tied=False)
    model.lm_head = head(ROWS, ROWS, bias=False)
    model.set_dtype(dtype)
    return Stages(row_selection(model, ROWS)).wait()


DTYPES = pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])


@DTYPES
@pytest.mark.parametrize("head", [RoundedLinear, MaskingLinear, LaterLinear])
def test_neither_roundings_nor_masks_hide_a_head(head: type[nn.Linear], dtype: mx.Dtype) -> None:
    assert selector_of(head, dtype).active


@DTYPES
@pytest.mark.parametrize("head", [SwappedLinear, OtherMaskLinear, NanLinear])
def test_wrong_logits_are_no_head(head: type[nn.Linear], dtype: mx.Dtype) -> None:
    assert not selector_of(head, dtype).active


def test_the_head_of_every_architecture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
    for layer, method in zip(layers, 2 * ["__call__"] + 2 * ["as_linear"], strict=True):
        monkeypatch.setattr(layer, method, rounded(getattr(layer, method)))
    is_found: dict[str, bool] = {}
    for name in names():
        config = config_of(name)
        try:
            model = build(config)
            vocab_size = embedding_rows(model, config["vocab_size"])
            assert vocab_size is not None
            is_found[name] = Stages(row_selection(model, vocab_size)).wait().active
        # A package or a Metal GPU is missing, or the architecture wraps one that its configuration
        # must name.
        except (ImportError, RuntimeError, SystemExit, TypeError, ValueError):
            continue
    assert len(is_found) > 120
    # Its head is an array, which it multiplies by itself.
    assert [name for name in is_found if not is_found[name]] == ["talkie"]
