"""A folder whose config does not say whether its head is tied has what its files have."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.decoders import DecoderPlan
from mlx_parallm.models.checkpoints.family_fields import DEFAULTS
from mlx_parallm.worker.pooling.decoder_loading import open_decoder
from mlx_parallm.worker.weights.loader import load_model, load_parameters
from tests.encoder_folders import golden_arrays, write_encoder
from tests.golden_weights import golden_weight

FAMILIES = Path(__file__).parent.parent / "golden" / "families"
CONFIG = ModelConfig(dtype="float32")
FIELD = "tie_word_embeddings"
#: ``UNTIED``: families whose head transformers does not tie by default.
UNTIED = sorted(name for name in DEFAULTS if DEFAULTS[name].get(FIELD) is False)
# Their golden weights cannot be read at all.
UNREAD = {"bitnet"}


def write(folder: Path, name: str, *, has_head: bool, is_tied: bool | None = None) -> Path:
    golden = json.loads((FAMILIES / f"{name}.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in golden["config"].items() if key != FIELD}
    weights = {
        key: array for key, array in golden_arrays(golden).items() if not key.startswith("lm_head.")
    }
    if has_head:
        size = (config["vocab_size"], config["hidden_size"])
        weights["lm_head.weight"] = mx.array(golden_weight("lm_head.weight", list(size)))
    return write_encoder(folder, config if is_tied is None else {**config, FIELD: is_tied}, weights)


def logits(model: Any) -> mx.array:
    return model(mx.array([[5, 6, 7]]))


@pytest.mark.parametrize("name", [name for name in UNTIED if name not in UNREAD])
def test_the_files_decide(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        untied = load_model(CONFIG, write(tmp_path / "untied", name, has_head=True)).model
        assert "it is tied" not in caplog.text
        folder = write(tmp_path / "tied", name, has_head=False)
        tied = load_model(CONFIG, folder)
    assert f"config.json {FIELD} nor the files a head, so it is tied" in caplog.text
    assert tied.config[FIELD] is True
    assert "lm_head" not in tied.model
    assert "lm_head" in untied
    named = write(tmp_path / "named", name, has_head=False, is_tied=True)
    assert mx.array_equal(logits(tied.model), logits(load_model(CONFIG, named).model))
    assert not mx.allclose(logits(tied.model), logits(untied))
    # A folder of new weights is read alike.
    assert "lm_head.weight" not in load_parameters(CONFIG, folder, is_cast=False)


def test_a_text_model_of_images(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", has_head=False)
    text = json.loads((folder / "config.json").read_text())
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    named = {f"language_model.{name}": array for name, array in arrays.items()}
    config = {"model_type": "llava", "image_token_index": 63, "text_config": text}
    (tmp_path / "image").mkdir()
    loaded = load_model(CONFIG, write_encoder(tmp_path / "image", config, named))
    assert loaded.config["text_config"][FIELD] is True


@pytest.mark.parametrize("has_head", [True, False])
def test_a_scorer_by_the_head(has_head: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", has_head=has_head)
    plan = DecoderPlan(head="choice", tasks=("classify",), chosen=(5, 6))
    assert open_decoder(CONFIG, folder, plan).model.score.weight.shape == (1, 32)


def test_pooling_decoders_warn_too_and_read_short_contexts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    golden = json.loads((FAMILIES / "phi3_longrope.json").read_text(encoding="utf-8"))
    folder = write_encoder(tmp_path, golden["config"], golden_arrays(golden))
    original = golden["config"]["rope_parameters"]["original_max_position_embeddings"]
    for length, warns in ((None, True), (original + 1, True), (original, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            config = ModelConfig(dtype="float32", max_model_len=length)
            loaded = open_decoder(config, folder, DecoderPlan())
        assert ("differs from transformers in rope_scaling" in caplog.text) is warns
        scaling = loaded.config["rope_scaling"]
        assert (scaling["long_factor"] == scaling["short_factor"]) is not warns
