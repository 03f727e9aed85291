"""Folders that transformers 5 saves compute what transformers computes, or are refused.

``scripts/golden_families.py`` writes what transformers saves and computes.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.decoder_sizes import kv_bytes_per_token
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.generation.cache_layout import kv_shapes, probe_layout
from mlx_parallm.worker.weights.loader import load_model
from scripts.golden_family_cases import FAMILIES
from tests.encoder_folders import write_golden

GOLDEN = Path(__file__).parent.parent / "golden" / "families"
NAMES = [case.name for case in FAMILIES]
#: ``REFUSED``: what mlx_lm's classes of the same name do not have, and a word of the message.
REFUSED = {
    # Weights that are not packed.
    "bitnet": "weight_scale",
    # Mixtures of experts.
    "llama4_text": "experts",
    # Lightning attention: mlx_lm's class is that of MiniMax M2.
    "minimax": "ModelArgs",
    # It needs a package of its own, and its module ends the process without it.
    "olmo": "SystemExit",
}
#: ``DIFFERENT``: the fields in which mlx_lm differs; a warning names each.
DIFFERENT = {
    "ernie4_5_moe": "moe_num_experts",
    "jamba": "num_experts",
    "olmo3_bases": "rope_parameters",
    "phi3_longrope": "rope_scaling",
    "qwen2_window": "sliding_window",
}
#: ``KV_APART``: families whose config.json gives another KV than their modules keep, or none.
KV_APART = {
    "falcon_mamba",
    "gemma4_text",
    "jamba",
    "longcat_flash",
    "mamba",
    "mamba2",
    "mimo_v2_flash",
    "nemotron_h",
    "recurrent_gemma",
}
# TOLERANCE: of the largest logit. Some models take another approximation of GELU.
TOLERANCE = 2e-3


def read_family(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def load(folder: Path, golden: dict[str, Any]) -> Any:
    return load_model(ModelConfig(dtype="float32"), write_golden(folder, golden)).model


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    return np.array(model(mx.array([ids]), cache=make_prompt_cache(model))[0].astype(mx.float32))


def difference(model: Any, golden: dict[str, Any]) -> float:
    """Return the largest difference of the logits, as a part of the largest of these."""
    expected = np.array(golden["logits"])
    apart = np.abs(logits_of(model, golden["ids"])[-len(expected) :] - expected)
    return float(apart.max() / np.abs(expected).max())


def test_every_family_has_golden_values() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED | DIFFERENT])
def test_logits_and_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    golden = read_family(name)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, golden)
    assert "differs from transformers" not in caplog.text
    assert difference(model, golden) <= TOLERANCE
    ids = list(golden["ids"])
    for token in golden["tokens"]:
        assert int(logits_of(model, ids)[-1].argmax()) == token
        ids.append(token)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_warning_names_the_field_that_differs(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    golden = read_family(name)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, golden)
    assert f"differs from transformers in {DIFFERENT[name]}: " in caplog.text
    # Once mlx_lm computes the same, the warning can go.
    assert difference(model, golden) > TOLERANCE


def test_a_context_within_the_original_one_has_its_factors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    golden = read_family("phi3_longrope")
    original = golden["config"]["rope_parameters"]["original_max_position_embeddings"]
    folder = write_golden(tmp_path, golden)
    for length, is_short in ((original, True), (original + 1, False)):
        config = ModelConfig(dtype="float32", max_model_len=length)
        caplog.clear()
        model = load_model(config, folder).model
        assert (difference(model, golden) <= TOLERANCE) is is_short
        assert ("differs from transformers" in caplog.text) is not is_short


@pytest.mark.parametrize("name", REFUSED)
def test_what_mlx_lm_lacks_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=REFUSED[name]):
        load(tmp_path, read_family(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_the_kv_that_a_config_gives_is_what_the_modules_keep(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, read_family(name))
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    kept = sum(shape.bytes_per_token(None) for shape in kv_shapes(probe_layout(model)))
    estimate = kv_bytes_per_token(config | {"dtype": "float32", "torch_dtype": "float32"})
    assert (estimate != kept) is (name in KV_APART)
