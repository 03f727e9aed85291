"""The shipped model that translates: its size, its files, the quality that its card states.

The bound for small samples is below the shares for the large ones in docs/demo-model.md.
"""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from demo.translate.batches import padded
from demo.translate.evaluate import held_out, wrong
from demo.translate.items import DIRECTIONS, KINDS, texts
from demo.translate.network import TrainedT5, load_model
from demo.translate.vocabulary import PAD_ID, new_tokenizer
from mlx_parallm.config import ModelConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDERS
from mlx_parallm.models.seq2seq.dense_cache import set_source
from mlx_parallm.types.model_input import TOKEN_IDS
from mlx_parallm.worker.weights.loader import load_model as load_served

FOLDER = DEMO_FOLDERS["demo:translate"]
TWO_MB = 2_000_000
SAMPLE, LEAST = 40, 0.95


@pytest.fixture(scope="module")
def model() -> TrainedT5:
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_shipped_files_are_complete_and_small() -> None:
    files = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= TWO_MB
    assert json.loads((FOLDER / "config.json").read_text())["model_type"] == "t5"


def test_the_shipped_tokenizer_is_that_of_the_scripts(tokenizer: Tokenizer) -> None:
    assert json.loads(tokenizer.to_str()) == json.loads(new_tokenizer().to_str())


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_translations_are_mostly_exact(
    model: TrainedT5, tokenizer: Tokenizer, kind: str
) -> None:
    values = held_out(kind, SAMPLE, seed=0)
    failures = [
        failure
        for direction in DIRECTIONS
        for failure in wrong(model, tokenizer, direction, values)
    ]
    assert len(failures) <= (1 - LEAST) * SAMPLE * len(DIRECTIONS), failures


def test_the_served_model_computes_what_was_trained(model: TrainedT5, tokenizer: Tokenizer) -> None:
    served = load_served(ModelConfig(dtype="float32"), FOLDER).model
    for direction in DIRECTIONS:
        written = texts(held_out("money", 1, seed=1)[0])
        source = tokenizer.encode(direction.prefix + written[direction.source]).ids
        target = [PAD_ID, *tokenizer.encode(written[direction.target]).ids]
        caches = served.make_cache()
        set_source(served, caches, {TOKEN_IDS: mx.array(source)})
        logits = served(mx.array([target]), caches)
        # The padding of the trained model's batches is left out of its result.
        expected = model(mx.array(padded([source])), mx.array([target]))
        assert np.allclose(logits, expected, atol=1e-3 * np.abs(expected).max())
