"""The golden cross-encoder and other models that score, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.embedder_folder import write_words
from tests.encoder_folders import GOLDEN, golden_arrays, read_golden, write_encoder, write_golden


def read_cross_encoder() -> dict[str, Any]:
    return json.loads((GOLDEN.parent / "cross_encoder.json").read_text(encoding="utf-8"))


def write_cross_encoder(folder: Path, **config: Any) -> Path:
    """Its folder; ``config`` has further keys of ``config.json``."""
    golden = read_cross_encoder()
    write_golden(folder, {**golden, "config": {**golden["config"], **config}})
    write_words(folder, golden["config"]["vocab_size"])
    return folder


def write_broken(folder: Path) -> Path:
    """Write a model whose finite weights are so large that its scores are not numbers."""
    golden = read_cross_encoder()
    weights = golden_arrays(golden)
    (name,) = (
        weight_name
        for weight_name in weights
        if weight_name.endswith("embeddings.LayerNorm.weight")
    )
    weights[name] = mx.full(weights[name].shape, mx.finfo(mx.float32).max)
    write_encoder(folder, golden["config"], weights)
    write_words(folder, golden["config"]["vocab_size"])
    return folder


def write_reward_model(folder: Path) -> Path:
    """Write a cross-encoder with a chat template; return the folder."""
    write_cross_encoder(folder)
    write_template(folder)
    return folder


def write_step_model(folder: Path) -> Path:
    """Write a classifier of tokens with two labels; return the folder."""
    golden = read_golden("bert_token")
    golden["config"]["id2label"] = {"0": "bad", "1": "good"}
    golden["weights"] |= {"classifier.weight": [2, 32], "classifier.bias": [2]}
    write_golden(folder, golden)
    write_words(folder, golden["config"]["vocab_size"])
    return folder


def write_template(folder: Path) -> None:
    """One that writes ``w90`` before what a user says and ``w91`` before what others say."""
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "chat_template.jinja").write_text(
        "{% for one in messages %}{% if one.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ 'w90 ' if one.role == 'user' else 'w91 ' }}{{ one.content }} {% endfor %}"
    )
