"""Quantised layers that take one token per row."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.runner.quantized_rows import flatten_quantized_rows


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.up = nn.Linear(64, 128, bias=True)
        self.down = nn.Linear(128, 64, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embed.as_linear(self.down(self.up(self.embed(tokens))))


def test_flat_layers_compute_the_same_from_the_same_parameters() -> None:
    model = Tied()
    nn.quantize(model, group_size=32, bits=4)
    tokens = mx.arange(10).reshape(5, 1, 2)
    wanted = [model(tokens), model(tokens[:, :, :1]), model(tokens[0])]
    names = [name for name, _ in tree_flatten(model.parameters())]
    assert flatten_quantized_rows(model) == 3
    assert flatten_quantized_rows(model) == 0
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    found = [model(tokens), model(tokens[:, :, :1]), model(tokens[0])]
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert mx.allclose(one, other, atol=1e-5)
    assert model.up(mx.ones((7, 1, 64))).shape == (7, 1, 128)
