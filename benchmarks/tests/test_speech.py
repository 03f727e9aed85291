"""Tests of the models and figures of the benchmark of speech."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.make_speech import NUM_WORDS, SHAPES, make_speech, vocabulary
from benchmarks.speech.__main__ import peer_checks, rate_checks, shared
from benchmarks.speech.engine import Job, gaps, measure
from benchmarks.speech.mlx_whisper_reference import POSITIONS, renamed
from mlx_parallm.config import ModelConfig
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.speech.rules import read_speech_rules
from mlx_parallm.worker.weights.loader import load_model, parameters_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speech(tmp_path_factory.mktemp("model"), "shrunk")


def test_vocabularies_have_the_ids_of_openai():
    tiny = vocabulary(SHAPES["tiny"]["vocab_size"])
    assert [tiny[number] for number in (50257, 50258, 50259, 50359, 50363, 50364)] == [
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        "<|transcribe|>",
        "<|notimestamps|>",
        "<|0.00|>",
    ]
    assert len(tiny) == 51865
    large = vocabulary(SHAPES["large-v3"]["vocab_size"])
    assert (len(large), large.index("<|transcribe|>")) == (51866, 50360)


def test_the_end_is_suppressed_and_the_language_known(model: Path):
    rules = read_speech_rules(model, load_tokenizer(model))
    assert rules is not None
    assert NUM_WORDS in rules.banned_ids
    assert rules.prompt("en", "transcribe", has_timestamps=False) == [50258, 50259, 50359, 50363]


def test_other_sides_get_the_weights_that_are_served(model: Path):
    served = parameters_of(load_model(ModelConfig(), model).model)
    read = mx.load(str(model / "model.safetensors"))
    assert isinstance(read, dict)
    assert {name.removeprefix("model.") for name in served} == {
        name.removeprefix("model.") for name in read
    }
    kernel = "model.encoder.conv1.weight"
    name, array = renamed(kernel, read[kernel])
    assert name == "encoder.conv1.weight"
    assert np.array_equal(np.array(array), np.array(served[kernel]))
    assert POSITIONS in read
    names = {renamed(name, array)[0] for name, array in read.items()}
    assert {
        "encoder.blocks.0.mlp1.bias",
        "encoder.ln_post.weight",
        "decoder.blocks.1.cross_attn_ln.weight",
        "decoder.blocks.0.mlp_ln.bias",
        "decoder.token_embedding.weight",
        "decoder.positional_embedding",
        "decoder.ln.bias",
    } <= names


def test_clips_have_the_same_tokens_in_a_batch_and_alone(model: Path, tmp_path: Path):
    file = tmp_path / "features.npy"
    job = Job(
        parts=("rates",),
        model=str(model),
        clips=2,
        seconds=1.0,
        max_tokens=3,
        alone=2,
        features=str(file),
    )
    figures = asyncio.run(measure(job))["rates"]
    json.dumps(figures)
    assert [len(tokens) for tokens in figures["tokens"]] == [3, 3]
    (only,) = figures["rounds"]
    assert only["equal"] == [True, True]
    assert only["batch"]["tokens"] == only["alone"]["tokens"] == 6
    assert np.load(file).shape == (2, 3000, 80)


def test_gaps_are_those_of_a_stream_within_a_time():
    figures = gaps([[0.0, 1.0, 1.5, 9.0], [1.0, 1.25]], 0.5, 2.5)
    assert figures["most_ms"] == 500.0
    assert figures["tokens_per_s"] == 2.0


def test_ratios_are_those_within_a_round():
    def side(*seconds: tuple[float, float]) -> dict:
        rounds = [
            {
                mode: {"clips": 1, "tokens": 11, "cpu_s": spent, "wall_s": spent, "first_s": 0}
                for mode, spent in (("batch", batch), ("alone", alone))
            }
            | {"equal": [True]}
            for batch, alone in seconds
        ]
        return {"rounds": rounds, "tokens": [[1], [2]]}

    own, peer = [side((1, 4), (2, 20)), side((4, 80))], [side((1, 2), (1, 5)), side((1, 20))]
    checks = {each.what: each.value for each in rate_checks(own, "cpu_s", 1)}
    assert checks["batch over alone"] == 10
    checks = {each.what: each.value for each in peer_checks("mlx-whisper", own, peer, "cpu_s")}
    assert checks["batch over mlx-whisper's batch"] == 0.5
    assert checks["alone over mlx-whisper's alone"] == 0.25
    assert checks["batch over mlx-whisper's alone"] == 2.5
    assert shared([[1], [2]], [[1], [3]]) == 0.5
