"""The defaults of encoders' configs are those of Hugging Face."""

from __future__ import annotations

from dataclasses import fields

import pytest
from transformers import CONFIG_MAPPING

from mlx_parallm.models.checkpoints.encoders import ENCODER_TYPES
from mlx_parallm.models.loading import ARCHITECTURES

FAMILY = ("bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")


def test_the_names_that_are_known_without_mlx_are_those_of_the_modules() -> None:
    assert ARCHITECTURES.keys() == ENCODER_TYPES


@pytest.mark.parametrize("model_type", FAMILY)
def test_defaults(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    args = ARCHITECTURES[model_type].ModelArgs()
    names = {field.name for field in fields(args)}
    # Fields that the class does not have do not matter.
    shared = {name for name in names if hasattr(config, name)}
    assert {"vocab_size", "max_position_embeddings", "num_labels"} <= shared
    assert {name: getattr(args, name) for name in shared} == {
        name: getattr(config, name) for name in shared
    }


def test_positions_behind_the_padding_id_shorten_inputs() -> None:
    lengths = {name: ARCHITECTURES[name].ModelArgs().max_length for name in FAMILY}
    assert lengths == dict.fromkeys(FAMILY, 512) | dict.fromkeys(
        ("mpnet", "roberta", "xlm-roberta"), 510
    )


def test_labels_are_counted() -> None:
    module = ARCHITECTURES["bert"]
    assert module.ModelArgs.from_dict({"num_labels": 1, "unknown": 3}).num_labels == 1
    assert module.ModelArgs.from_dict({"id2label": {"0": "a", "1": "b", "2": "c"}}).num_labels == 3
