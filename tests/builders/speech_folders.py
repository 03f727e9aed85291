"""Tiny speech models whose tokens are bytes: random ones, and one that hears the same always."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.models.seq2seq.whisper import Model, ModelArgs
from mlx_parallm.tokenizer.vocabulary import gpt2_byte_map
from mlx_parallm.worker.weights.loader import parameters_of
from tests.byte_vocabulary import NO_FLAGS, byte_level
from tests.golden_weights import golden_weight

LANGUAGES = ("en", "de", "fr")
#: ``END``: the end token; those before it are bytes, and the others behind it in this order.
END = 256
SPECIALS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
IDS = {token: END + number for number, token in enumerate(SPECIALS)}
BEGIN = END + len(SPECIALS)
STEPS = 1501
# CERTAINTY: how much a position counts in the hidden state, where a token counts 1.
CERTAINTY = 64.0
CONFIG: dict[str, Any] = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "vocab_size": BEGIN + STEPS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "max_target_positions": 64,
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    "eos_token_id": END,
    "pad_token_id": END,
    "torch_dtype": "float32",
}


def write_speech(folder: Path, *, is_english: bool = False, **fields: Any) -> Path:
    """Write a folder with random weights; ``fields`` replace those of its config."""
    config = CONFIG | fields
    return _write(folder, config, _random_weights(config), is_english=is_english)


def write_scripted_speech(folder: Path, text: str, *, end_s: float = 1.0, then: str = "") -> Path:
    """Write a folder of a model that hears the same in every window.

    Its positions alone choose tokens: English, a timestamp of 0 s, a text of ASCII that does not
    begin with a space, and the timestamp of its end. It begins with the text where there are no
    timestamps. Where there is a second text, ``then``, it takes a second behind the first one.
    """
    end = BEGIN + round(end_s * 50)
    script = [IDS["<|en|>"], END, BEGIN, *text.encode(), end]
    if then:
        script += [end, *then.encode(), end + 50]
    script.append(END)
    size = max(64, 1 << (len(script) + 1).bit_length())
    config = CONFIG | {"d_model": size, "max_target_positions": size}
    weights = _random_weights(config)
    for name, array in weights.items():
        if name.endswith(("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")):
            weights[name] = mx.zeros_like(array)
    # The rows of a Hadamard matrix but the first are orthogonal, and their mean is 0.
    rows = mx.hadamard_transform(mx.eye(size))[1:]
    positions, tokens = mx.zeros((size, size)), mx.zeros((config["vocab_size"], size))
    for place, token_id in enumerate(script):
        positions[place] = CERTAINTY * rows[place]
        tokens[token_id] += rows[place]
    weights |= {
        "model.decoder.embed_positions.weight": positions,
        "model.decoder.embed_tokens.weight": tokens,
        "model.decoder.layer_norm.weight": mx.full((size,), CERTAINTY),
        "model.decoder.layer_norm.bias": mx.zeros((size,)),
    }
    return _write(folder, config, weights)


def _random_weights(config: dict[str, Any]) -> dict[str, mx.array]:
    model = Model(ModelArgs.from_dict(config | {"tie_word_embeddings": True}))
    return {
        name: mx.array(golden_weight(name, array.shape))
        for name, array in parameters_of(model).items()
    }


def _write(
    folder: Path, config: dict[str, Any], weights: dict[str, mx.array], *, is_english: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generation = {
        "decoder_start_token_id": config["decoder_start_token_id"],
        "eos_token_id": END,
        "is_multilingual": not is_english,
        "no_timestamps_token_id": IDS["<|notimestamps|>"],
        "suppress_tokens": [*range(32), *range(127, 256), *list(IDS.values())[1:-1]],
        "begin_suppress_tokens": [32, END],
        "max_initial_timestamp_index": 50,
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    for name, content in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "WhisperTokenizer"},
    }.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def tokenizer() -> dict[str, Any]:
    """Return the JSON of a tokenizer whose texts are bytes."""
    content = byte_level()
    content["model"]["vocab"] = dict(gpt2_byte_map())
    stamps = [f"<|{step / 50:.2f}|>" for step in range(STEPS)]
    content["added_tokens"] = [
        {"id": END + number, "content": token, "special": number < len(SPECIALS)} | NO_FLAGS
        for number, token in enumerate([*SPECIALS, *stamps])
    ]
    return content
