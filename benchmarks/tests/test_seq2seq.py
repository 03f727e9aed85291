"""Tests of the models and figures of the benchmark of encoder-decoders."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.make_seq2seq import SHAPES, make_seq2seq, words
from benchmarks.seq2seq.__main__ import cpu_checks, make_parser, shared, sized
from benchmarks.seq2seq.engine import Run, decoder_bytes
from benchmarks.seq2seq.reference import read_weights, vocabulary_of
from mlx_parallm.config import ModelConfig
from mlx_parallm.worker.weights.loader import load_model, parameters_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seq2seq(tmp_path_factory.mktemp("model"), "tiny-t5")


def test_equal_seeds_give_equal_models_that_are_made_once(model: Path, tmp_path: Path):
    again = make_seq2seq(tmp_path, "tiny-t5")
    weights = again / "model.safetensors"
    assert weights.read_bytes() == (model / "model.safetensors").read_bytes()
    made_ns = weights.stat().st_mtime_ns
    make_seq2seq(tmp_path, "tiny-t5")
    assert weights.stat().st_mtime_ns == made_ns
    make_seq2seq(tmp_path, "tiny-t5", seed=1)
    assert weights.read_bytes() != (model / "model.safetensors").read_bytes()


def test_the_reader_without_safetensors_reads_what_is_served(model: Path):
    served = parameters_of(load_model(ModelConfig(), model).model)
    read = read_weights(model / "model.safetensors")
    assert read.keys() == served.keys()
    assert all(np.array_equal(read[name], np.array(served[name])) for name in read)
    assert vocabulary_of(model) == words(SHAPES["tiny-t5"]["vocab_size"])


def test_a_decode_step_reads_the_decoder_and_the_head_but_not_the_projections_of_sources():
    config = SHAPES["tiny-t5"]
    width, inner = config["d_model"], config["d_kv"] * config["num_heads"]
    layer = 6 * width * inner + 2 * width * config["d_ff"] + 3 * width
    bias = config["relative_attention_num_buckets"] * config["num_heads"]
    expected = 2 * layer + width + bias + config["vocab_size"] * width
    assert decoder_bytes(config) == 2 * expected
    assert mx.bfloat16.size == 2


def test_gaps_are_those_within_a_request():
    run = Run(
        times_s={"a": [1.0, 1.5, 1.75], "b": [2.0, 4.0]}, tokens={"a": [1, 2, 3], "b": [4, 5]}
    )
    assert run.gaps_ms == [500.0, 250.0, 2000.0]
    assert run.first_s == 2.0
    assert run.figures()["tokens"] == 5


def test_ratios_are_those_within_a_repetition():
    def side(batch_s: float, alone_s: float) -> dict:
        figures = {
            name: {"tokens": 100, "cpu_s": seconds, "wall_s": 1e9}
            for name, seconds in (("batch", batch_s), ("alone", alone_s))
        }
        return {**figures, "equal": [True], "tokens": [[1], [2]]}

    own = [side(1, 4), side(2, 20), side(4, 80)]
    peer = [side(1, 2), side(1, 5), side(1, 20)]
    args = make_parser().parse_args([])
    checks = {check.what: check.value for check in cpu_checks(own, peer, args)}
    assert checks["batch over alone"] == 10
    assert checks["batch over CTranslate2's"] == 0.5
    assert checks["alone over CTranslate2's"] == 0.25
    assert shared({"tokens": [[1], [2]]}, {"tokens": [[1], [3]]}) == 0.5


def test_tiny_sizes_are_an_eighth():
    parser = make_parser()
    assert sized(parser.parse_args(["--tiny"]), 512) == 64
    assert sized(parser.parse_args(["--gpu"]), 512) == 512


def test_the_tokenizer_has_a_token_for_each_word(model: Path):
    settings = json.loads((model / "tokenizer.json").read_text())
    assert settings["model"]["vocab"]["t7"] == 7
