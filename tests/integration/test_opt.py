"""OPT, which mlx_lm lacks, against transformers (scripts/golden_decoder_cases.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, models, pre_tokenizers

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.config import ModelConfig
from mlx_parallm.models.opt import Model
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.path_choice import choose_path
from mlx_parallm.worker.generation.step_rows import token_array
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.weights.loader import load_model
from tests.decoder_folders import assert_golden, read_generator
from tests.encoder_folders import golden_arrays, write_encoder, write_golden
from tests.golden_weights import golden_adapter_weight
from tests.host_tensors import all_host

ATOL = 1e-4
TABLE = "model.decoder.embed_tokens.weight"
RANK, ALPHA = 4, 8
TARGETS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")),
    "fc1",
    "fc2",
)
Weights = dict[str, mx.array]


@pytest.fixture(params=["opt_125m", "opt_350m", "opt_plain"])
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_generator(request.param)


def load(folder: Path, dtype: str = "auto") -> Any:
    return load_model(ModelConfig(dtype=dtype), folder).model


def test_logits_are_those_of_transformers(golden: dict[str, Any], tmp_path: Path) -> None:
    assert_golden(load(write_golden(tmp_path, golden)), golden)


def test_a_batch_with_caches_equals_each_sequence_alone(
    golden: dict[str, Any], tmp_path: Path
) -> None:
    model = load(write_golden(tmp_path, golden))
    rows = golden["inputs"]["input_ids"]
    width = max(map(len, rows))
    # Padding is on the right, where no token attends to it.
    batch = mx.array([ids + [3] * (width - len(ids)) for ids in rows])
    caches = make_prompt_cache(model)
    parts = [model(part, cache=caches) for part in (batch[:, :4], batch[:, 4:5], batch[:, 5:])]
    together = np.array(mx.concatenate(parts, axis=1))
    for row, expected in zip(together, golden["logits"], strict=True):
        np.testing.assert_allclose(row[: len(expected)], np.array(expected), atol=ATOL)


def without_model(weights: Weights) -> Weights:
    """Name weights as in the first files of the hub, which are of the bare model."""
    renamed = {name.removeprefix("model."): array for name, array in weights.items()}
    return renamed | {"decoder.version": mx.array([3.0])}


def with_head(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights[TABLE]}


def with_head_alone(weights: Weights) -> Weights:
    return {name: with_head(weights)[name] for name in with_head(weights) if name != TABLE}


@pytest.mark.parametrize("rename", [without_model, with_head, with_head_alone])
@pytest.mark.parametrize("name", ["opt_125m", "opt_350m"])
def test_all_names_of_checkpoints_load(
    name: str, rename: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    golden = read_generator(name)
    weights = rename(golden_arrays(golden))
    assert_golden(load(write_encoder(tmp_path, golden["config"], weights)), golden)


def test_quantised_weights_load_and_run(tmp_path: Path) -> None:
    golden = read_generator("opt_125m")
    model = load(write_golden(tmp_path / "plain", golden))
    nn.quantize(
        model,
        group_size=32,
        bits=8,
        # The input of fc2 is no multiple of the group.
        class_predicate=lambda path, m: hasattr(m, "to_quantized") and not path.endswith("fc2"),
    )
    config = {**golden["config"], "quantization": {"group_size": 32, "bits": 8}}
    arrays: Any = tree_flatten(model.parameters())
    folder = write_encoder(tmp_path / "quantised", config, dict(arrays))
    packed = load(folder, "float32")
    assert isinstance(packed.model.decoder.embed_tokens, nn.QuantizedEmbedding)
    assert isinstance(packed.layers[0].self_attn.q_proj, nn.QuantizedLinear)
    for model in (packed, load(folder)):
        assert_golden(model, golden, atol=0.5)


@pytest.mark.parametrize(
    ("field", "value"), [("activation_function", "selu"), ("num_attention_heads", 5)]
)
def test_configs_that_cannot_run_are_refused_by_field(
    field: str, value: Any, tmp_path: Path
) -> None:
    golden = read_generator("opt_125m")
    golden["config"][field] = value
    with pytest.raises(ModelLoadError, match=field):
        load(write_golden(tmp_path, golden))


def adapter_tensors(model: Model) -> dict[str, mx.array]:
    """Return a LoRA adapter of all targets by PEFT's names."""
    tensors = {}
    for number, layer in enumerate(model.layers):
        for target in TARGETS:
            path = f"base_model.model.model.decoder.layers.{number}.{target}"
            outputs, inputs = dict(layer.named_modules())[target].weight.shape
            for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                name = f"{path}.lora_{part}.weight"
                tensors[name] = mx.array(golden_adapter_weight(name, shape))
    return tensors


def merged(weights: Weights, tensors: Weights) -> Weights:
    """Return the weights with the adapter's changes added."""
    merged = dict(weights)
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            merged[target] = merged[target] + ALPHA / RANK * (b @ a)
    return merged


@pytest.mark.parametrize("name", ["opt_125m", "opt_350m"])
def test_an_adapter_by_pefts_names_equals_merged_weights(name: str, tmp_path: Path) -> None:
    golden = read_generator(name)
    model = load(write_golden(tmp_path / "base", golden))
    tensors = adapter_tensors(model)
    weights = merged(golden_arrays(golden), tensors)
    changed = load(write_encoder(tmp_path / "merged", golden["config"], weights))
    path = choose_path(
        model,
        probe_layout(model),
        ReferenceAttention(4),
        vocab_size=golden["config"]["vocab_size"],
        num_blocks=32,
        block_size=4,
        dtype="float32",
    ).path
    assert path.name == "packed"
    layers = AdaptedLayers(model, mx.float32, path.adapters)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    layers.put(1, read_adapter(config, all_host(tensors), param="adapter"), param="adapter")
    texts = golden["inputs"]["input_ids"][:1] * 2
    sequences = [
        ScheduledSequence(
            seq_id=slot,
            slot=slot,
            start=0,
            token_ids=tuple(ids),
            block_table=tuple(range(3 * slot, 3 * slot + 3)),
            adapter_slot=slot,
        )
        for slot, ids in enumerate(texts)
    ]
    last = [len(texts[0]) - 1, 2 * len(texts[0]) - 1]
    base, adapted = path.logits(sequences, token_array(sequences), last)
    ids = mx.array(texts[:1])
    np.testing.assert_allclose(np.array(base), golden["logits"][0][-1], atol=ATOL)
    np.testing.assert_allclose(np.array(adapted), np.array(changed(ids)[0, -1]), atol=ATOL)
    assert not mx.allclose(base, adapted, atol=0.1)


def test_texts_begin_with_the_end_token(tmp_path: Path) -> None:
    """Check a folder as on the hub: GPT-2's files, and a field that asks for the token."""
    vocab = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>"])}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab |= {char: len(vocab) + i for i, char in enumerate(alphabet)}
    Tokenizer(models.BPE(vocab, [])).model.save(str(tmp_path))
    settings: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    settings |= {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "eos_token_id": 2}))
    tokenizer = load_tokenizer(tmp_path)
    letters = [vocab["a"], vocab["b"]]
    assert tokenizer.encode("ab") == [2, *letters]
    assert tokenizer.encode("ab", add_special_tokens=False) == letters
    assert tokenizer.encode("") == [2]
