"""A cross-encoder's files say whether its scores are logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.models.checkpoints.encoders import scores_are_logits
from mlx_parallm.types.errors import ModelLoadError

LOGITS = "torch.nn.modules.linear.Identity"
LOGISTIC = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("config", "newer", "wanted"),
    [
        ({}, None, False),
        ({"sbert_ce_default_activation_function": LOGITS}, None, True),
        ({"sentence_transformers": {"activation_fn": LOGITS}}, None, True),
        ({"sentence_transformers": {"version": "4.0"}}, None, False),
        ({"sbert_ce_default_activation_function": LOGITS}, {"activation_fn": LOGISTIC}, False),
        ({}, {"activation_fn": LOGITS}, True),
        ({}, {"prompts": {}}, False),
    ],
)
def test_the_newest_place_counts(
    tmp_path: Path, config: dict[str, Any], newer: dict[str, Any] | None, wanted: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if newer is not None:
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(newer))
    assert scores_are_logits(tmp_path) is wanted


def test_other_functions_and_broken_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}')
    with pytest.raises(ModelLoadError, match="Tanh"):
        scores_are_logits(tmp_path)
    file.write_text("{")
    with pytest.raises(ModelLoadError, match="could not be read"):
        scores_are_logits(tmp_path)
