"""Which classes of mlx_lm hold weights otherwise than their checkpoints, and what becomes of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest

from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.checkpoint_changes import NORMALISED, SCALED
from mlx_parallm.worker.lora.context import AdapterContext
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build
from tests.host_tensors import host

SOURCES = {path.stem: path for path in Path(mlx_lm.models.__path__[0]).glob("*.py")}
#: Classes that multiply weights only to unpack 8-bit or 4-bit numbers: changes stay as they are.
UNPACKED = {
    *("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k3", "kimi_linear", "longcat_flash"),
    *("mimo_v2_flash", "minimax", "ministral3", "mistral4"),
}
#: Classes that move rows of weights of linear layers, and modules by the checkpoint's names that
#: the model does not have any more: adapters that change them are refused.
MOVED = {
    "bailing_hybrid": "attention.kv_b_proj",
    "bailing_moe_v3": "attention.kv_b_proj",
    "deepseek_v3": "self_attn.kv_b_proj",
    "deepseek_v32": "self_attn.kv_b_proj",
    "glm4_moe_lite": "self_attn.kv_b_proj",
    "granitemoehybrid": "block_sparse_moe.input_linear",
    "hunyuan": "self_attn.qkv_proj",
    "kimi_linear": "self_attn.kv_b_proj",
    "longcat_flash": "self_attn.0.kv_b_proj",
    "mistral4": "self_attn.kv_b_proj",
    "muse_spark": "self_attn.q_proj",
}
#: Classes that move the axes of experts, convolutions or scales of quantisation alone, or, as
#: GPT-2's, of all linear layers, whose adapters are not transposed with them.
OTHERS = {
    *("dbrx", "deepseek_v41", "falcon_h1", "gear", "gemma4_text", "gpt2", "gpt_oss", "granitemoe"),
    *("jamba", "kimi_k3", "lfm2", "lfm2_moe", "llama4", "mamba", "mamba2", "mimo_v2_flash"),
    *("minimax", "minimax_m3_vl", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_next"),
    *("qwen3_vl_moe", "recurrent_gemma", "rwkv7"),
}
ARITHMETIC = (ast.Mult, ast.Div, ast.MatMult, ast.Pow)
MOVES = {
    *("reshape", "swapaxes", "transpose", "moveaxis", "concatenate", "split", "take", "flatten"),
    *("unflatten", "repeat", "tile", "T"),
}
TEXTS = ("k", "key", "name", "w_key")


def nodes_of_sanitize(name: str) -> Iterator[ast.AST]:
    """Yield what the methods ``sanitize`` of a module do, with functions of it that they call."""
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    pending: list[ast.AST] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "sanitize"
    ]
    while pending:
        for node in ast.walk(pending.pop()):
            yield node
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = functions.pop(node.func.id, None)
                pending += [] if called is None else [called]


def multiplies(name: str) -> bool:
    return any(
        isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ARITHMETIC)
        for node in nodes_of_sanitize(name)
    )


def moves(name: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in MOVES
        # Names are split too.
        and not (isinstance(node.value, ast.Name) and node.value.id in TEXTS)
        for node in nodes_of_sanitize(name)
    )


def test_every_class_that_multiplies_weights_is_known() -> None:
    multiplying = {name for name in SOURCES if multiplies(name)}
    # Muse Spark multiplies gates, norms and scales of experts; the rest is in ``MOVED``.
    assert multiplying == {*SCALED, *NORMALISED, *UNPACKED, "muse_spark"}


def test_every_class_that_moves_rows_is_known() -> None:
    assert {name for name in SOURCES if moves(name)} == MOVED.keys() | OTHERS


def layers_of(name: str, **changed: Any) -> AdaptedLayers:
    model = build({**config_of(name), **changed})
    return AdaptedLayers(model, mx.float32, AdapterContext())


def change_of(path: str, shape: tuple[int, ...] = (4, 4)) -> AdapterWeights:
    a, b = (host(mx.ones(size)) for size in ((2, shape[1]), (shape[0], 2)))
    change = LowRank(kind="linear", a=a, b=b, scale=1.0)
    return AdapterWeights({path: change}, of_checkpoint=True)


@pytest.mark.parametrize("name", MOVED)
def test_changes_of_modules_whose_rows_are_moved_are_refused(name: str) -> None:
    layers = layers_of(name)
    prefix = "model.language_model" if name == "muse_spark" else "model"
    with pytest.raises(InvalidRequestError, match="has no module"):
        layers.of_model(change_of(f"{prefix}.layers.1.{MOVED[name]}"), param="adapter")


@pytest.mark.parametrize("name", NORMALISED)
def test_changes_of_weights_that_are_divided_by_their_norms_are_refused(name: str) -> None:
    _, field = NORMALISED[name]
    on = {} if field is None else {field: True}
    with pytest.raises(InvalidRequestError, match="lm_head is divided by its norms"):
        layers_of(name, **on).of_model(change_of("lm_head"), param="adapter")
    if field is not None:
        layers_of(name, **{field: False}).of_model(change_of("lm_head"), param="adapter")


@pytest.mark.parametrize("name", SCALED)
def test_changes_are_scaled_as_the_weights_are(name: str) -> None:
    layers = layers_of(name)
    modules = dict(layers_paths(layers))
    for path, shape in modules.items():
        adapter = change_of(path, shape)
        own = layers.of_model(adapter, param="adapter").modules[path]
        weight = mx.ones(shape)
        mark = {SCALED[name]: mx.zeros((1, 1, 2))}
        loaded = layers._changes._model.sanitize({**mark, f"{path}.weight": weight})
        # Both factors are ones, so the product is twice the weight.
        np.testing.assert_allclose(
            own.scale * own.b.array @ own.a.array, 2 * np.array(loaded[f"{path}.weight"]), rtol=1e-5
        )


def layers_paths(layers: AdaptedLayers) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, module in layers._modules.items():
        if path.rpartition(".")[2].endswith(("_proj", "lm_head")):
            yield path, layers._whole_shape(path)
            assert module is not None
