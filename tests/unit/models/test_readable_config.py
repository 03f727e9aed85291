"""Both generations of config.json mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.models.checkpoints.rope_fields import readable_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("part", [None, "text_config", "llm_config"])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_rope_parameters_are_read_wherever_they_stand(
    part: str | None, scaling: dict[str, Any] | None
) -> None:
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 3e4}
    # An older field beside them does not count.
    text = {"model_type": "qwen2", "rope_theta": 1e6, "rope_parameters": rope}
    config = text if part is None else {"model_type": "internvl", part: text}
    read = readable_config(config)
    read = read if part is None else read[part]
    assert read["rope_theta"] == 3e4
    if scaling is None:
        assert read["rope_scaling"] is None
    else:
        assert read["rope_scaling"]["type"] == "yarn"
        assert read["rope_scaling"]["factor"] == 4.0


def test_bases_by_kind_of_layer() -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 3e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    read = readable_config({"model_type": "gemma3_text", "rope_parameters": rope})
    assert (read["rope_theta"], read["rope_local_base_freq"]) == (3e4, 5e3)


@pytest.mark.parametrize(
    "scaling", [None, {**YARN, "type": "yarn"}, {"type": "linear", "factor": 2}]
)
def test_older_fields_stay(scaling: dict[str, Any] | None) -> None:
    config = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling, "head_dim": 4}
    read = readable_config({**config, "tie_word_embeddings": True})
    assert read["rope_theta"] == 5e5
    assert (read["rope_scaling"] or {}).get("factor") == (scaling or {}).get("factor")
    assert read["head_dim"] == 4
    assert read["tie_word_embeddings"]


def test_defaults_are_those_of_transformers() -> None:
    assert readable_config({"model_type": "llama"})["tie_word_embeddings"] is False
    assert readable_config({"model_type": "qwen2"})["rope_theta"] == 1e4
    assert "tie_word_embeddings" not in readable_config({"model_type": "gemma2"})


def test_a_config_is_not_changed() -> None:
    config = {"model_type": "llava", "text_config": {"rope_parameters": {"rope_theta": 2.0}}}
    readable_config(config)
    assert config == {
        "model_type": "llava",
        "text_config": {"rope_parameters": {"rope_theta": 2.0}},
    }
