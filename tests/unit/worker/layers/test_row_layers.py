"""Linear layers that take one token per row."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.layers.row_layers import picked_rows, siblings_of, use_row_layers
from mlx_parallm.worker.lora.adapted_group import rows_of_output
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import AdapterRows
from tests.builders.architectures.configs import config_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 96, bias=False)
        self.k_proj = nn.Linear(64, 32, bias=False)
        self.v_proj = nn.Linear(64, 32, bias=False)
        self.gate_proj = nn.Linear(160, 64, bias=False)
        self.up_proj = nn.Linear(160, 64, bias=True)

    def __call__(self, x: mx.array) -> mx.array:
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        joined = mx.concatenate(parts, axis=-1)
        return self.gate_proj(joined) * self.up_proj(joined)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.block = Block()

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embed.as_linear(self.block(self.embed(tokens)))


ROWS = mx.arange(8).reshape(8, 1)
#: Also shapes that are no rows, or as many rows as nothing is padded to.
INPUTS = (ROWS, ROWS[:1], ROWS[:3], mx.arange(6).reshape(2, 3))


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_row_layers_compute_the_same_from_the_same_parameters(bits: int | None) -> None:
    model = Tied()
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    wanted = [model(tokens) for tokens in INPUTS]
    before = dict(tree_flatten(model.parameters()))
    assert use_row_layers(model, None) == (6 if bits else 5)
    assert use_row_layers(model, None) == 0
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys()
    assert all(mx.array_equal(after[name], before[name]) for name in after)
    for run in (model, mx.compile(model)):
        for tokens, expected in zip(INPUTS, wanted, strict=True):
            actual = run(tokens)
            assert actual.shape == expected.shape
            assert mx.allclose(actual, expected, atol=1e-5)


FLOATS = (mx.bfloat16, mx.float16, mx.float32)


@pytest.mark.parametrize("scales", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_and_scales_of_other_dtypes_are_multiplied_as_mlx_does(
    dtype: mx.Dtype, scales: mx.Dtype
) -> None:
    """Check layers of files with bfloat16 norms and float32 scales: products are float32."""
    model = Tied()
    nn.quantize(model, group_size=32, bits=4)
    for name in ("scales", "biases"):
        model.embed[name] = model.embed[name].astype(scales)
        # The keys' scales have another dtype than those that are multiplied with them.
        for layer in (model.block.q_proj, model.block.v_proj, model.block.up_proj):
            layer[name] = layer[name].astype(scales)
    x = mx.random.normal((4, 1, 64), dtype, key=mx.random.key(1))

    def calls() -> list[Any]:
        block = model.block
        projections = [block.q_proj, block.k_proj, block.v_proj, block.gate_proj, block.up_proj]
        return [*projections, model.embed.as_linear]

    inputs = [mx.random.normal((4, 1, 160), dtype) if i in (3, 4) else x for i in range(6)]
    wanted = [call(rows) for call, rows in zip(calls(), inputs, strict=True)]
    use_row_layers(model, None)
    for call, rows, expected in zip(calls(), inputs, wanted, strict=True):
        actual = call(rows)
        assert actual.dtype == expected.dtype
        assert mx.abs(actual - expected).max() <= 0.02 * mx.abs(expected).max()


class Sharing(nn.Module):
    """A model with one block twice, a block with another's keys and values, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        first, second = Block(), Block()
        second.k_proj, second.v_proj = first.k_proj, first.v_proj
        self.layers = [first, second, first]
        self.head = nn.Linear(64, 96, bias=False)
        self.output = self.head

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(hidden)


@pytest.mark.parametrize("bits", [None, 4])
def test_layers_that_a_model_has_in_several_places_are_replaced_once(bits: int | None) -> None:
    model = Sharing()
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    wanted = [model(tokens) for tokens in INPUTS]
    use_row_layers(model, None)
    for run in (model, mx.compile(model)):
        for tokens, expected in zip(INPUTS, wanted, strict=True):
            assert mx.allclose(run(tokens), expected, atol=1e-5)


def test_new_weights_are_used() -> None:
    model = Tied()
    use_row_layers(model, None)
    old = model(ROWS)
    model.block.k_proj.weight = model.block.k_proj.weight * 3
    model.embed.weight = model.embed.weight * 2
    plain = Tied()
    plain.update(model.parameters())
    assert mx.allclose(model(ROWS), plain(ROWS), atol=1e-5)
    assert not mx.allclose(model(ROWS), old, atol=1e-2)


def test_layers_of_one_input_are_one_product_each_of_another_its_own() -> None:
    block = Block()
    other = Block()
    other.update(block.parameters())
    use_row_layers(block, None)
    x, y = mx.random.normal((2, 4, 1, 64))
    queries = block.q_proj(x)
    assert mx.allclose(block.k_proj(y), other.k_proj(y), atol=1e-6)
    assert mx.allclose(block.k_proj(x), other.k_proj(x), atol=1e-6)
    assert mx.allclose(block.q_proj(x), queries, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("qwen3_5", [["in_proj_qkv", "in_proj_z"], ["in_proj_b", "in_proj_a"], ["out_proj"]]),
        ("qwen3_next", [["in_proj_qkvz", "in_proj_ba"], ["out_proj"]]),
    ],
)
def test_inputs_of_gated_delta_nets_are_one_product(name: str, groups: list[list[str]]) -> None:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    args = getattr(module, "TextModelArgs", module.ModelArgs).from_dict(config_of(name))
    kind = getattr(module, "GatedDeltaNet", None) or module.Qwen3NextGatedDeltaNet
    layer = kind(args)
    x = mx.random.normal((4, 1, args.hidden_size), key=mx.random.key(0))
    wanted = layer(x)
    use_row_layers(layer, None)
    for group in groups:
        (product,) = {
            id(layer[name]["_product"]): layer[name]["_product"] for name in group
        }.values()
        assert product.widths == [layer[name]["weight"].shape[0] for name in group]
    assert mx.allclose(layer(x), wanted, atol=1e-5)


class Decoder(nn.Module):
    """Layers by the names of T5 and of BART."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for module in ("SelfAttention", "EncDecAttention", "self_attn", "encoder_attn"):
            attention = nn.Module()
            for name in names:
                attention[name] = nn.Linear(32, 32, bias=False)
            self[module] = attention


@pytest.mark.parametrize("names", [("q", "k", "v"), ("q_proj", "k_proj", "v_proj")])
def test_queries_of_cross_attention_are_multiplied_alone(names: tuple[str, ...]) -> None:
    model = Decoder(*names)
    assert use_row_layers(model, None) == 12
    for module, number in (
        ("SelfAttention", 3),
        ("self_attn", 3),
        ("EncDecAttention", 1),
        ("encoder_attn", 1),
    ):
        product = model[module][names[0]]["_product"]
        assert len(product.widths) == number
        assert len(siblings_of(f"decoder.{module}.{names[0]}")) == number


def test_a_new_number_of_rows_waits_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    model.eval()
    assert use_row_layers(model, None) == 1
    x = mx.random.normal((4, 1, 8), key=mx.random.key(0))
    wanted = x @ model.layers[0].weight.T

    def wait(*_: object) -> None:
        raise AssertionError("steps in flight are awaited")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", wait)
        actual = model(x)
    assert mx.allclose(actual, wanted)


def _picked_for_the_head(x: mx.array, rows: mx.array) -> mx.array:
    selector = RowSelector()
    selector.rows = rows
    return selector.pick(x)


def _picked_for_adapters(x: mx.array, rows: mx.array) -> mx.array:
    class Head(nn.Linear):
        def selected_rows(self) -> mx.array:
            return rows

    context = AdapterContext()
    with context.during(AdapterRows.of_step(np.zeros(x.size // 8, np.int32))):
        return rows_of_output(x, Head(8, 8), context)[0]


@pytest.mark.parametrize("pick", [picked_rows, _picked_for_the_head, _picked_for_adapters])
@pytest.mark.parametrize("shape", [(6, 1, 8), (2, 3, 8)])
def test_picked_rows_are_in_row_major_order(
    pick: Callable[[mx.array, mx.array], mx.array], shape: tuple[int, ...]
) -> None:
    # MLX's product on CUDA takes rows with other strides one by one.
    x = mx.random.normal(shape, key=mx.random.key(0))
    rows = pick(x, mx.array([4, 1, 5]))
    mx.eval(rows)
    assert np.asarray(rows).strides == (32, 32, 4)
    assert mx.array_equal(rows[:, 0], x.reshape(-1, 8)[mx.array([4, 1, 5])])
