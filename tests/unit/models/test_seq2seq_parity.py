"""Encoder-decoders against transformers in float64: tests/golden/seq2seq."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.seq2seq.dense_cache import set_source
from mlx_parallm.models.seq2seq.interface import is_encoder_decoder
from mlx_parallm.worker.weights.loader import load_model
from tests.encoder_folders import write_golden
from tests.golden_sources import golden_array
from tests.seq2seq_folders import read_seq2seq, seq2seq_names

# CHUNK: tokens of a completion that a model reads at once.
CHUNK = 8


def batched(tokens: list[int], size: int) -> Iterator[list[int]]:
    """Yield the tokens in order, as many at a time."""
    for first in range(0, len(tokens), size):
        yield tokens[first : first + size]


def load(folder: Path, golden: dict[str, Any]) -> Any:
    model = load_model(ModelConfig(dtype="float32"), write_golden(folder, golden)).model
    assert is_encoder_decoder(model)
    return model


def caches_of(model: Any, golden: dict[str, Any], case: dict[str, Any]) -> list[Any]:
    caches = model.make_cache()
    name, array = golden_array(golden["config"], case)
    set_source(model, caches, {name: mx.array(array)})
    return caches


@pytest.mark.parametrize("name", seq2seq_names())
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    model = load(tmp_path, golden)
    for number, case in enumerate(golden["sources"]):
        caches = caches_of(model, golden, case)
        logits = [np.array(model(mx.array([case["prompt"]]), caches)[0, -1])]
        # One source is continued token by token, the others in chunks.
        size = CHUNK if number else 1
        for chunk in batched(case["tokens"][:-1], size):
            logits.extend(np.array(model(mx.array([chunk]), caches)[0]))
        assert [int(row.argmax()) for row in logits] == case["tokens"]
        for row, expected in zip((logits[0], logits[-1]), np.array(case["logits"]), strict=True):
            assert np.abs(row - expected).max() <= golden["tolerance"] * np.abs(expected).max()
