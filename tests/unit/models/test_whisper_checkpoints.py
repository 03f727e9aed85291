"""Checkpoints of Whisper have the names of transformers or of OpenAI; both give the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.seq2seq.dense_cache import set_source
from mlx_parallm.models.seq2seq.whisper import Model, ModelArgs, sinusoids
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.weights.loader import load_model, parameters_of
from tests.encoder_folders import write_encoder
from tests.golden_weights import golden_weight
from tests.seq2seq_folders import read_seq2seq

# WIDTH: OpenAI's feed-forward part has four times as many units as a hidden state has numbers.
WIDTH = 32
# PACKING: settings of ``mlx.nn.quantize``.
PACKING: dict[str, Any] = {"group_size": 32, "bits": 8}
POSITIONS = "model.encoder.embed_positions.weight"
#: ``OPENAI``: parts of transformers' names of parameters, and OpenAI's.
OPENAI = {
    ".layers.": ".blocks.",
    ".self_attn_layer_norm.": ".attn_ln.",
    ".encoder_attn_layer_norm.": ".cross_attn_ln.",
    ".self_attn.": ".attn.",
    ".encoder_attn.": ".cross_attn.",
    ".q_proj.": ".query.",
    ".k_proj.": ".key.",
    ".v_proj.": ".value.",
    ".out_proj.": ".out.",
    ".fc1.": ".mlp1.",
    ".fc2.": ".mlp2.",
    ".final_layer_norm.": ".mlp_ln.",
    "encoder.layer_norm.": "encoder.ln_post.",
    "decoder.layer_norm.": "decoder.ln.",
    ".embed_tokens.": ".token_embedding.",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
}


def weights_of(config: dict[str, Any]) -> dict[str, mx.array]:
    """Return weights by transformers' names; the encoder's positions are sinusoids."""
    shapes: dict[str, list[int]] = read_seq2seq("whisper")["weights"]
    weights = {
        name: mx.array(golden_weight(name, [4 * WIDTH if n == 48 else n for n in shape]))
        for name, shape in shapes.items()
    }
    weights[POSITIONS] = mx.array(sinusoids(ModelArgs.from_dict(config)))
    return weights


def openai_weights(
    weights: Mapping[str, mx.array], *, from_torch: bool = True
) -> dict[str, mx.array]:
    """Return the weights as MLX's port of OpenAI's model saves them, without the positions.

    Args:
        weights: by transformers' names.
        from_torch: whether convolutions have torch's layout.
    """
    saved = {"alignment_heads": mx.zeros((1, 2))}
    for key, array in weights.items():
        name = key.removeprefix("model.")
        for part, other in OPENAI.items():
            name = name.replace(part, other)
        is_kernel = from_torch and "conv" in name and name.endswith("weight")
        saved[name] = array.swapaxes(1, 2) if is_kernel else array
    del saved["encoder.embed_positions.weight"]
    return saved


def wide_config() -> dict[str, Any]:
    sizes = {"encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH}
    return read_seq2seq("whisper")["config"] | sizes


def openai_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config by OpenAI's names, as mlx-community's folders have it."""
    return {
        "model_type": "whisper",
        "n_mels": config["num_mel_bins"],
        "n_audio_ctx": config["max_source_positions"],
        "n_audio_state": config["d_model"],
        "n_audio_head": config["encoder_attention_heads"],
        "n_audio_layer": config["encoder_layers"],
        "n_vocab": config["vocab_size"],
        "n_text_ctx": config["max_target_positions"],
        "n_text_state": config["d_model"],
        "n_text_head": config["decoder_attention_heads"],
        "n_text_layer": config["decoder_layers"],
    }


def test_names_fields_and_layouts_of_openai(tmp_path: Path) -> None:
    config = wide_config()
    weights = weights_of(config)
    settings = ModelConfig(dtype="float32")
    ours = load_model(settings, write_encoder(tmp_path / "ours", config, weights)).model
    folder = write_encoder(tmp_path / "openai", openai_fields(config), openai_weights(weights))
    theirs = load_model(settings, folder).model
    expected, own = parameters_of(ours), parameters_of(theirs)
    assert own.keys() == expected.keys()
    assert all(mx.array_equal(own[name], expected[name]) for name in own)


@pytest.mark.parametrize("has_openai_names", [False, True])
def test_quantised_folders_have_whole_convolutions(
    tmp_path: Path, *, has_openai_names: bool
) -> None:
    config = wide_config()
    model = Model(ModelArgs.from_dict(config | {"tie_word_embeddings": True}))
    model.load_weights(list(model.sanitize(weights_of(config)).items()))
    # MLX's port of OpenAI's model has no layer for positions, so they are never packed.
    nn.quantize(
        model,
        **PACKING,
        class_predicate=lambda name, module: (
            isinstance(module, nn.Linear | nn.Embedding) and "positions" not in name
        ),
    )
    packed = parameters_of(model)
    saved = openai_weights(packed, from_torch=False) if has_openai_names else packed
    fields = openai_fields(config) if has_openai_names else config
    folder = write_encoder(tmp_path, fields | {"quantization": PACKING}, saved)
    whole = load_model(ModelConfig(), folder).model
    own = parameters_of(whole)
    for name, array in own.items():
        scales = packed.get(f"{name.removesuffix('weight')}scales")
        if name.endswith("weight") and scales is not None:
            biases = packed[f"{name.removesuffix('weight')}biases"]
            expected = mx.dequantize(packed[name], scales, biases, **PACKING)
        else:
            expected = packed[name]
        assert mx.allclose(array, expected), name
    # A CPU multiplies small models out; a dtype that is named keeps them packed.
    kept = load_model(ModelConfig(dtype="float16"), folder).model
    assert "model.decoder.embed_tokens.scales" in parameters_of(kept)
    assert mx.allclose(logits_of(kept), logits_of(whole), atol=0.05)


def logits_of(model: Any) -> mx.array:
    caches = model.make_cache()
    set_source(model, caches, model.example_source(model.max_source_len))
    return model(mx.array([[1, 2, 3]]), caches).astype(mx.float32)


def test_without_its_name_a_trunk_is_read_too(tmp_path: Path) -> None:
    config = read_seq2seq("whisper")["config"]
    shapes = read_seq2seq("whisper")["weights"]
    weights = {name: mx.array(golden_weight(name, shape)) for name, shape in shapes.items()}
    bare = {name.removeprefix("model."): array for name, array in weights.items()}
    settings = ModelConfig(dtype="float32")
    whole = load_model(settings, write_encoder(tmp_path / "whole", config, weights)).model
    own = load_model(settings, write_encoder(tmp_path / "bare", config, bare)).model
    assert all(
        mx.array_equal(array, parameters_of(whole)[name])
        for name, array in parameters_of(own).items()
    )


def test_the_file_of_mlx_community_is_read(tmp_path: Path) -> None:
    config = read_seq2seq("whisper")["config"]
    shapes = read_seq2seq("whisper")["weights"]
    weights = {name: mx.array(golden_weight(name, shape)) for name, shape in shapes.items()}
    folder = write_encoder(tmp_path, config, weights)
    settings = ModelConfig(dtype="float32")
    usual = parameters_of(load_model(settings, folder).model)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    other = parameters_of(load_model(settings, folder).model)
    assert all(mx.array_equal(array, usual[name]) for name, array in other.items())


def test_the_older_file_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    config = read_seq2seq("whisper")["config"]
    folder = write_encoder(tmp_path, config, {"x": mx.zeros(1)})
    (folder / "model.safetensors").unlink()
    mx.savez(str(folder / "weights.npz"), x=mx.zeros(1))
    with pytest.raises(ModelLoadError, match=r"mx\.save_safetensors"):
        load_model(ModelConfig(), folder)
