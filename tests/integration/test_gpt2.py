"""GPT-2 as transformers writes it today, and as the hub's first files have it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.worker.weights.loader import load_model
from tests.decoder_folders import assert_golden, read_generator
from tests.encoder_folders import golden_arrays, write_encoder

PREFIX = "transformer."


@pytest.mark.parametrize("is_first", [False, True])
def test_logits_are_those_of_transformers(is_first: bool, tmp_path: Path) -> None:
    golden = read_generator("gpt2")
    config, weights = golden["config"], golden_arrays(golden)
    if is_first:
        config |= {"n_ctx": config["n_positions"]}
        weights = {name.removeprefix(PREFIX): array for name, array in weights.items()}
        weights["h.0.attn.bias"] = mx.ones((1, 1, 40, 40))
        weights["h.0.attn.masked_bias"] = mx.array(-1e4)
    else:
        assert all(name.startswith(PREFIX) for name in weights)
        assert "n_ctx" not in config
        weights["lm_head.weight"] = weights[f"{PREFIX}wte.weight"]
    loaded = load_model(ModelConfig(), write_encoder(tmp_path, config, weights))
    assert_golden(loaded.model, golden)
