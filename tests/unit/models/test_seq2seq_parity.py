"""Encoder-decoders against transformers in float64: tests/golden/seq2seq."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.seq2seq.dense_cache import set_source
from mlx_parallm.models.seq2seq.interface import is_encoder_decoder
from mlx_parallm.types.model_input import TOKEN_IDS
from mlx_parallm.worker.weights.loader import load_model
from tests.encoder_folders import write_golden
from tests.golden_sources import golden_ids

GOLDEN = Path(__file__).parents[2] / "golden" / "seq2seq"
NAMES = sorted(file.stem for file in GOLDEN.glob("*.json"))


def read_seq2seq(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def load(folder: Path, golden: dict[str, Any]) -> Any:
    model = load_model(ModelConfig(dtype="float32"), write_golden(folder, golden)).model
    assert is_encoder_decoder(model)
    return model


def caches_of(model: Any, source: list[int]) -> list[Any]:
    caches = model.make_cache()
    set_source(model, caches, {TOKEN_IDS: mx.array(source)})
    return caches


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    model = load(tmp_path, golden)
    for case in golden["sources"]:
        source = golden_ids(case["seed"], case["length"], golden["config"]["vocab_size"])
        caches = caches_of(model, source)
        logits = np.array(model(mx.array([case["prompt"]]), caches)[0, -1])
        expected = np.array(case["logits"])
        assert np.abs(logits - expected).max() <= golden["tolerance"] * np.abs(expected).max()
        for token in case["tokens"]:
            assert int(logits.argmax()) == token
            logits = np.array(model(mx.array([[token]]), caches)[0, -1])
