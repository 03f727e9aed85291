"""Adapters of OPT and GPT-2 by the names that PEFT gives them, against merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.config import ModelConfig
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.path_choice import choose_path
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.step_rows import token_array
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import load_model
from tests.decoder_folders import read_generator
from tests.encoder_folders import golden_arrays, write_encoder, write_golden
from tests.golden_weights import golden_adapter_weight
from tests.host_tensors import all_host

RANK, ALPHA = 4, 8
PREFIX = "base_model.model."
OPT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
GPT2 = ("c_attn", "c_proj", "c_fc")
Weights = dict[str, mx.array]


def adapter_of(weights: Weights, targets: tuple[str, ...], *, is_transposed: bool) -> Weights:
    """Return a LoRA adapter of all layers with these names, by PEFT's names."""
    tensors = {}
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if path == name or path.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = reversed(weight.shape) if is_transposed else weight.shape
        for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            tensor = f"{PREFIX}{path}.lora_{part}.weight"
            tensors[tensor] = mx.array(golden_adapter_weight(tensor, shape))
    return tensors


def merged(weights: Weights, tensors: Weights, *, is_transposed: bool) -> Weights:
    """Return the weights with the adapter's changes added."""
    result = dict(weights)
    for name, a in tensors.items():
        if ".lora_A." in name:
            change = ALPHA / RANK * (tensors[name.replace("lora_A", "lora_B")] @ a)
            target = name.removeprefix(PREFIX).replace(".lora_A", "")
            result[target] = result[target] + (change.T if is_transposed else change)
    return result


def path_of(model: Any, vocab_size: int) -> ForwardPath:
    return at_once(choose_path)(
        model,
        probe_layout(model),
        ReferenceAttention(4),
        vocab_size=vocab_size,
        num_blocks=32,
        block_size=4,
        dtype="float32",
    ).path


@pytest.mark.parametrize(
    ("name", "targets"), [("opt_125m", OPT), ("opt_350m", OPT), ("gpt2", GPT2)]
)
def test_adapters_equal_merged_weights(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    golden = read_generator(name)
    # GPT-2's files have the weights of linear layers transposed.
    is_transposed = name == "gpt2"
    weights = golden_arrays(golden)
    tensors = adapter_of(weights, targets, is_transposed=is_transposed)
    assert len(tensors) == 2 * 2 * (6 if targets is OPT else 4)
    changed = merged(weights, tensors, is_transposed=is_transposed)
    folder = write_encoder(tmp_path / "merged", golden["config"], changed)
    wanted = load_model(ModelConfig(), folder).model
    model = load_model(ModelConfig(), write_golden(tmp_path / "base", golden)).model
    path = path_of(model, golden["config"]["vocab_size"])
    assert path.name == "packed"
    layers = AdaptedLayers(model, mx.float32, path.adapters)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    layers.put(1, read_adapter(config, all_host(tensors), param="adapter"), param="adapter")
    ids = golden["inputs"]["input_ids"][0]
    sequences = [
        ScheduledSequence(
            seq_id=slot,
            slot=slot,
            start=0,
            token_ids=tuple(ids),
            block_table=tuple(range(3 * slot, 3 * slot + 3)),
            adapter_slot=slot,
        )
        for slot in (0, 1)
    ]
    last = [len(ids) - 1, 2 * len(ids) - 1]
    base, adapted = path.logits(sequences, token_array(sequences), last)
    np.testing.assert_allclose(np.array(base), golden["logits"][0][-1], atol=1e-4)
    expected = wanted(mx.array([ids]))[0, -1]
    np.testing.assert_allclose(np.array(adapted), np.array(expected), atol=1e-4)
    assert not mx.allclose(base, adapted, atol=0.1)
