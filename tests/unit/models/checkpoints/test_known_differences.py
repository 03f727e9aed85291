"""Warnings name what transformers computes otherwise, and nothing that it does not."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.models.checkpoints.known_differences import DIFFERENCES, known_differences

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


FIXED = [
    (name, row[0], row[1].removeprefix("it counts as "))
    for name, rows in DIFFERENCES.items()
    for row in rows
    if row[1].startswith("it counts as ")
]


@pytest.mark.parametrize(("model_type", "field", "value"), FIXED)
def test_a_field_that_is_not_read_warns_of_other_values(
    model_type: str, field: str, value: str
) -> None:
    own = {"None": None, "True": True, "False": False}.get(value, value)
    own = float(own) if isinstance(own, str) else own
    other = not own if isinstance(own, bool) else 3.5
    for fields in ({}, {field: own}):
        assert known_differences({"model_type": model_type, **fields}) == ()
    (difference,) = known_differences({"model_type": model_type, field: other})
    assert difference == f"{field}: it counts as {value}"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_position_embeddings": 8192}, ()),
        ({"max_position_embeddings": 8193}, ("attention_chunk_size", "attn_temperature_tuning")),
        (
            {"max_position_embeddings": 32768, "attention_chunk_size": None},
            ("attn_temperature_tuning",),
        ),
        (
            {"max_position_embeddings": 32768, "attn_temperature_tuning": False},
            ("attention_chunk_size",),
        ),
        (
            {"max_position_embeddings": 512, "floor_scale": 64},
            ("attn_temperature_tuning",),
        ),
    ],
)
def test_llama4_on_long_texts(fields: dict[str, Any], named: tuple[str, ...]) -> None:
    differences = known_differences({"model_type": "llama4_text", **fields})
    assert tuple(each.split(":")[0] for each in differences) == named


def test_norms_of_groups() -> None:
    config = {"model_type": "falcon_h1", "mamba_rms_norm": True}
    assert known_differences({**config, "mamba_n_groups": 1}) == ()
    assert known_differences({**config, "mamba_n_groups": 2})
    assert known_differences({**config, "mamba_n_groups": 2, "mamba_rms_norm": False}) == ()
