"""Linear layers that take one token per row."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.runner.row_layers import use_row_layers


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.up = nn.Linear(64, 128, bias=True)
        self.down = nn.Linear(128, 64, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embed.as_linear(self.down(self.up(self.embed(tokens))))


def test_row_layers_compute_the_same_until_the_weight_changes() -> None:
    model = Tied()
    rows, text = mx.arange(8).reshape(8, 1), mx.arange(6).reshape(2, 3)
    wanted = [model(tokens) for tokens in (rows, rows[:3], text)]
    assert use_row_layers(model) == 2
    names = [name for name, _ in tree_flatten(model.parameters())]
    found = [model(tokens) for tokens in (rows, rows[:3], text)]
    for one, other in zip(found, wanted, strict=True):
        assert mx.allclose(one, other, atol=1e-5)
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    compiled = mx.compile(model)
    assert mx.allclose(compiled(rows), wanted[0], atol=1e-5)
    model.down.weight = model.down.weight * 2
    assert mx.allclose(model(rows), 2 * wanted[0], atol=1e-4)


def test_flat_layers_compute_the_same_from_the_same_parameters() -> None:
    model = Tied()
    nn.quantize(model, group_size=32, bits=4)
    tokens = mx.arange(10).reshape(5, 1, 2)
    wanted = [model(tokens), model(tokens[:, :, :1]), model(tokens[0])]
    names = [name for name, _ in tree_flatten(model.parameters())]
    assert use_row_layers(model) == 3
    assert use_row_layers(model) == 0
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    found = [model(tokens), model(tokens[:, :, :1]), model(tokens[0])]
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert mx.allclose(one, other, atol=1e-5)
    assert model.up(mx.ones((7, 1, 64))).shape == (7, 1, 128)
