"""The shipped encoders: their size, their files, and the quality that their card states.

The bounds for small samples are below the shares for the large ones in docs/demo-model.md.
"""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from demo.encoders.evaluate import EVALUATIONS, Stored
from mlx_parallm.demo_models.folders import DEMO_FOLDERS, PREFIX
from mlx_parallm.models.checkpoints.sentence_transformers import read_vector_spec

NAMES = ("mlm", "sentiment", "embed", "reward")
FOUR_MB = 4_000_000
ARCHITECTURES = {
    "mlm": "BertForMaskedLM",
    "sentiment": "BertForSequenceClassification",
    "embed": "BertModel",
    "reward": "ModernBertForSequenceClassification",
}


def files(name: str) -> list[Path]:
    return [file for file in DEMO_FOLDERS[PREFIX + name].rglob("*") if file.is_file()]


def test_all_of_them_are_small():
    assert sum(file.stat().st_size for name in NAMES for file in files(name)) <= FOUR_MB


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_has_the_form_of_hugging_face(name: str):
    folder = DEMO_FOLDERS[PREFIX + name]
    assert DEMO_FOLDERS[PREFIX + name] == folder
    present = {str(file.relative_to(folder)) for file in files(name)}
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    if name == "embed":
        expected |= {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json"}
        assert read_vector_spec(folder).normalizes
    assert present == expected
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[name]]
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} == {mx.float16}


@pytest.mark.parametrize(
    ("name", "limit", "bound"),
    [("mlm", 40, 0.6), ("sentiment", 500, 0.95), ("embed", 1000, 0.9), ("reward", 50, 0.9)],
)
def test_held_out_accuracy(name: str, limit: int, bound: float):
    measure, _ = EVALUATIONS[name]
    assert measure(Stored(DEMO_FOLDERS[PREFIX + name]), limit, 1)["all"] >= bound
