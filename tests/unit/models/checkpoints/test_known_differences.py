"""Warnings name what transformers computes otherwise, and nothing that it does not."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.models.checkpoints.known_differences import known_differences

WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_position_embeddings": 256,
    "num_hidden_layers": 4,
}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("fields", "slides"),
    [
        ({"max_window_layers": 3}, True),
        ({"max_window_layers": 4}, False),
        ({"max_window_layers": 28}, False),
        ({}, False),
        ({"num_hidden_layers": 36}, True),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, True),
        ({"layer_types": ["full_attention"] * 4, "max_window_layers": 0}, False),
        ({"use_sliding_window": False, "max_window_layers": 0}, False),
        ({"sliding_window": 256, "max_window_layers": 0}, False),
    ],
)
def test_a_window_counts_from_a_layer_on(
    model_type: str, fields: dict[str, Any], slides: bool
) -> None:
    named = known_differences({"model_type": model_type, **WINDOW, **fields})
    assert bool(named) is slides
    assert all(each.startswith("sliding_window: ") for each in named)
