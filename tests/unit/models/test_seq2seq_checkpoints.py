"""Checkpoints of encoder-decoders have many forms; all give the same model, or a clear error."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.encoder_decoders import ENCODER_DECODER_TYPES
from mlx_parallm.models.decoder_classes import ENCODER_DECODERS, decoder_classes
from mlx_parallm.models.seq2seq.positions import marian_sinusoids
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.worker.generation.row_selection import vocab_size_of
from mlx_parallm.worker.weights.loader import CastRule, LoadedModel, load_model, parameters_of
from mlx_parallm.worker.weights.model_weights import ModelWeights
from tests.encoder_folders import golden_arrays, write_encoder, write_golden
from tests.seq2seq_folders import read_seq2seq

Weights = dict[str, mx.array]

FLOAT32 = ModelConfig(dtype="float32")
T5_TABLES = ("shared", "decoder.embed_tokens", "encoder.embed_tokens", "lm_head")
BART_TABLES = tuple(f"model.{name}" for name in T5_TABLES[:3])
POSITIONS = "model.encoder.embed_positions.weights"


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return all choices of some names but none."""
    sizes = range(1, len(names) + 1)
    return [choice for size in sizes for choice in itertools.combinations(names, size)]


def loaded(folder: Path, config: dict[str, Any], weights: Weights) -> LoadedModel:
    return load_model(FLOAT32, write_encoder(folder, config, weights))


def assert_same(model: LoadedModel, expected: Mapping[str, mx.array]) -> None:
    own = parameters_of(model.model)
    assert own.keys() == expected.keys()
    assert all(mx.array_equal(own[name], expected[name]) for name in own)


def with_tables(weights: Weights, table: str, names: tuple[str, ...]) -> Weights:
    """Return the weights with a table under other names."""
    rest = {name: array for name, array in weights.items() if name != f"{table}.weight"}
    return rest | {f"{name}.weight": weights[f"{table}.weight"] for name in names}


def without_trunk(weights: Weights) -> Weights:
    return {name.removeprefix("model."): array for name, array in weights.items()}


def test_the_types_are_those_that_have_classes() -> None:
    assert ENCODER_DECODERS.keys() == ENCODER_DECODER_TYPES


@pytest.mark.parametrize("names", subsets(T5_TABLES))
def test_a_tied_table_of_t5_may_have_any_of_its_names(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    golden = read_seq2seq("t5")
    weights = golden_arrays(golden)
    model = loaded(tmp_path, golden["config"], with_tables(weights, "shared", names))
    assert_same(model, weights)


@pytest.mark.parametrize("names", subsets(T5_TABLES[:3]))
@pytest.mark.parametrize("name", ["t5_v1_1", "mt5", "umt5"])
def test_a_head_of_its_own_stays(name: str, names: tuple[str, ...], tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    weights = golden_arrays(golden)
    assert "lm_head.weight" in weights
    model = loaded(tmp_path, golden["config"], with_tables(weights, "shared", names))
    assert_same(model, weights)


def test_ids_are_those_of_the_table_of_targets(tmp_path: Path) -> None:
    for name in ("t5", "bart", "marian_two_tables"):
        golden = read_seq2seq(name)
        model = loaded(tmp_path / name, golden["config"], golden_arrays(golden))
        assert vocab_size_of(model) == 64
        # Older configs of T5 lack the field, and the table of biases has 32 rows.
        del model.config["vocab_size"]
        assert vocab_size_of(model) == 64


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("names", [*subsets((*BART_TABLES, "lm_head"))])
def test_a_table_of_bart_may_have_any_of_its_names(
    names: tuple[str, ...], is_bare: bool, tmp_path: Path
) -> None:
    golden = read_seq2seq("bart")
    weights = golden_arrays(golden)
    saved = with_tables(weights, "model.shared", names)
    model = loaded(tmp_path, golden["config"], without_trunk(saved) if is_bare else saved)
    assert_same(model, weights)


@pytest.mark.parametrize("is_tied", [False, True])
def test_marian_has_two_tables(is_tied: bool, tmp_path: Path) -> None:
    golden = read_seq2seq("marian_two_tables")
    weights = golden_arrays(golden)
    assert {f"{name}.weight" for name in BART_TABLES[1:]} <= weights.keys()
    head = weights["model.decoder.embed_tokens.weight"]
    expected = dict(weights)
    if not is_tied:
        head = head + 1
        expected["lm_head.weight"] = head
    model = loaded(tmp_path, golden["config"], weights | {"lm_head.weight": head})
    assert_same(model, expected)


@pytest.mark.parametrize("name", ["bart", "mbart", "pegasus", "marian"])
def test_logits_have_no_bias_if_the_files_have_none(name: str, tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    weights = golden_arrays(golden)
    del weights["final_logits_bias"]
    assert_same(loaded(tmp_path, golden["config"], weights), weights)


@pytest.mark.parametrize("name", ["marian", "pegasus_computed"])
def test_sinusoids_of_the_files_count(name: str, tmp_path: Path) -> None:
    # A fine-tuned model may have others: https://github.com/guillaume-be/rust-bert/issues/228.
    golden = read_seq2seq(name)
    weights, size = golden_arrays(golden), golden["config"]["d_model"]
    table = mx.array(marian_sinusoids(golden["config"]["max_position_embeddings"], size))
    saved = {f"model.{side}.embed_positions.weight": table for side in ("encoder", "decoder")}
    changed = {key: 2 * array for key, array in saved.items()}
    tokens = mx.array([[3, 5, 9]])
    logits = [
        loaded(tmp_path / str(number), golden["config"], weights | more).model(tokens)
        for number, more in enumerate([{}, saved, changed])
    ]
    assert mx.array_equal(logits[0], logits[1])
    assert mx.abs(logits[0] - logits[2]).max() > 0.1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_table_and_a_head_in_other_copies(name: str, tmp_path: Path) -> None:
    # The head is no table then: https://github.com/huggingface/transformers/issues/48154.
    golden = read_seq2seq(name)
    weights = golden_arrays(golden)
    table = "shared" if name == "t5" else "model.shared"
    head = {"lm_head.weight": weights[f"{table}.weight"] + 1}
    for number, copy in enumerate(("decoder", "encoder")):
        names = (table.replace("shared", f"{copy}.embed_tokens"),)
        saved = with_tables(weights, table, names) | head
        model = loaded(tmp_path / str(number), golden["config"], saved)
        assert_same(model, weights | head)


@pytest.mark.parametrize(
    ("name", "unused", "shape"),
    [
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (32, 4)),
        ("bart", "model.encoder.version", (1,)),
        ("bart", "model.decoder.version", (1,)),
        ("m2m_100", "model.encoder.embed_positions.weights", (322, 32)),
        ("m2m_100", "model.decoder.embed_positions.weight", (322, 32)),
        ("m2m_100", "final_logits_bias", (1, 64)),
    ],
)
def test_weights_that_no_version_of_a_model_uses_are_not_read(
    name: str, unused: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    golden = read_seq2seq(name)
    weights = golden_arrays(golden)
    model = loaded(tmp_path, golden["config"], weights | {unused: mx.ones(shape)})
    assert_same(model, weights)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_word_embeddings_that_differ_are_refused(name: str, tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    weights = golden_arrays(golden)
    table = "shared" if name == "t5" else "model.shared"
    other = table.replace("shared", "encoder.embed_tokens")
    weights[f"{other}.weight"] = weights[f"{table}.weight"] + 1
    with pytest.raises(ModelLoadError, match=f"{table} and {other} differ"):
        loaded(tmp_path, golden["config"], weights)


@pytest.mark.parametrize("name", ["t5", "bart", "marian_two_tables"])
def test_an_encoder_alone_is_refused(name: str, tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    weights = {key: array for key, array in golden_arrays(golden).items() if "decoder." not in key}
    with pytest.raises(ModelLoadError, match="no decoder, and an encoder alone"):
        loaded(tmp_path, golden["config"], weights)


@pytest.mark.parametrize("name", ["t5", "t5_v1_1", "bart", "marian_two_tables"])
def test_updates_have_the_names_that_transformers_has_in_memory(name: str, tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    weights = golden_arrays(golden)
    model = loaded(tmp_path, golden["config"], weights)
    tables = T5_TABLES[:3] if "shared.weight" in weights else BART_TABLES
    in_memory = dict(weights)
    if f"{tables[0]}.weight" in weights:
        in_memory |= {f"{each}.weight": weights[f"{tables[0]}.weight"] for each in tables}
    sent = {key: to_host(array) for key, array in in_memory.items()}
    read_back = ModelWeights(model).read_tensors(sent)
    assert read_back.keys() == weights.keys()
    assert all(mx.array_equal(read_back[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", ["t5", "t5_v1_1", "bart"])
def test_quantised_models_are_read(name: str, tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    model = loaded(tmp_path / "plain", golden["config"], golden_arrays(golden)).model

    def is_quantised(path: str, module: nn.Module) -> bool:
        weight = module.get("weight")
        wide = hasattr(module, "to_quantized") and weight is not None and weight.shape[1] % 32 == 0
        return wide and "relative_attention_bias" not in path

    nn.quantize(model, 32, 8, class_predicate=is_quantised)
    packed = parameters_of(model)
    assert any(key.endswith("shared.scales") for key in packed)
    config = golden["config"] | {"quantization": {"group_size": 32, "bits": 8}}
    folder = write_encoder(tmp_path / "packed", config, packed)
    read_back = load_model(ModelConfig(), folder, cast=CastRule(is_cast=False))
    assert_same(read_back, packed)
    tokens = mx.array([[3, 5]])
    # Products of packed weights are sums of the same numbers in another order.
    assert mx.allclose(read_back.model(tokens), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "mt5", "umt5", "flan", "byt5", "madlad"])
def test_float16_is_refused_where_it_overflows(name: str, tmp_path: Path) -> None:
    folder = write_golden(tmp_path, read_seq2seq(name))
    with pytest.raises(ConfigError, match=r"float16 is too narrow.*bfloat16"):
        load_model(ModelConfig(dtype="float16"), folder)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_auto_is_bfloat16_where_float16_overflows(
    name: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    golden = read_seq2seq(name)
    weights = {key: array.astype(dtype) for key, array in golden_arrays(golden).items()}
    folder = write_encoder(tmp_path, golden["config"], weights)
    model = load_model(ModelConfig(), folder, cast=CastRule(is_cast=False))
    expected = mx.bfloat16 if name == "t5" and dtype == mx.float16 else dtype
    assert {array.dtype for array in parameters_of(model.model).values()} == {expected}
    # On a CPU it is float32, as for decoders.
    assert load_model(ModelConfig(), folder, cast=CastRule(is_cast=True)).dtype == "float32"


def test_float16_is_served_where_it_does_not(tmp_path: Path) -> None:
    folder = write_golden(tmp_path, read_seq2seq("bart"))
    assert load_model(ModelConfig(dtype="float16"), folder).dtype == "float16"


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_a_folder_of_pickles_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_seq2seq("marian")["config"]))
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"examples/safetensors_from_bin\.py"):
        load_model(FLOAT32, tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj"),
        ("bart", {"activation_function": "tanh"}, "activation_function"),
        ("bart", {"encoder_attention_heads": 5}, "encoder_attention_heads 5"),
        ("bart", {"decoder_attention_heads": 7}, "decoder_attention_heads 7"),
    ],
)
def test_configs_that_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    golden = read_seq2seq(name)
    with pytest.raises(ModelLoadError, match=message):
        loaded(tmp_path, golden["config"] | change, golden_arrays(golden))


@pytest.mark.parametrize(
    ("fields", "is_scaled"),
    [
        ({"model_type": "t5"}, True),
        ({"model_type": "t5", "tie_word_embeddings": True}, True),
        ({"model_type": "t5", "tie_word_embeddings": False}, False),
        ({"model_type": "t5", "tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"model_type": "t5", "tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
        ({"model_type": "mt5"}, False),
        ({"model_type": "mt5", "tie_word_embeddings": True}, False),
        ({"model_type": "umt5", "tie_word_embeddings": False}, True),
    ],
)
def test_outputs_are_scaled_as_the_family_says(fields: dict[str, Any], is_scaled: bool) -> None:
    args = decoder_classes(dict(fields))[1].from_dict(fields)
    assert args.scales_outputs is is_scaled
