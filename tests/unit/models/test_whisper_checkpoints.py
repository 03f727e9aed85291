"""Checkpoints of Whisper have the names of transformers or of OpenAI; both give the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.seq2seq.whisper import ModelArgs, sinusoids
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.weights.loader import load_model, parameters_of
from tests.encoder_folders import write_encoder
from tests.golden_weights import golden_weight
from tests.seq2seq_folders import read_seq2seq

# WIDTH: OpenAI's feed-forward part has four times as many units as a hidden state has numbers.
WIDTH = 32
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


def openai_weights(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights as MLX's port of OpenAI's model saves them, without the positions."""
    saved = {"alignment_heads": mx.zeros((1, 2))}
    for key, array in weights.items():
        name = key.removeprefix("model.")
        for part, other in OPENAI.items():
            name = name.replace(part, other)
        is_kernel = "conv" in name and name.endswith("weight")
        saved[name] = array.swapaxes(1, 2) if is_kernel else array
    del saved["encoder.embed_positions.weight"]
    return saved


def test_names_fields_and_layouts_of_openai(tmp_path: Path) -> None:
    sizes = {"encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH}
    config = read_seq2seq("whisper")["config"] | sizes
    weights = weights_of(config)
    fields = {
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
    settings = ModelConfig(dtype="float32")
    ours = load_model(settings, write_encoder(tmp_path / "ours", config, weights)).model
    folder = write_encoder(tmp_path / "openai", fields, openai_weights(weights))
    theirs = load_model(settings, folder).model
    expected, own = parameters_of(ours), parameters_of(theirs)
    assert own.keys() == expected.keys()
    assert all(mx.array_equal(own[name], expected[name]) for name in own)


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
