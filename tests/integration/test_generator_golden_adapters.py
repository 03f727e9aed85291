"""Adapters as PEFT saves them give PEFT's logits; what is no plain change is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from mlx_parallm.adapters.writing import adapter_files
from mlx_parallm.types.errors import InvalidRequestError
from tests.encoder_folders import write_golden
from tests.generator_adapters import (
    PREFIX,
    AdaptedGenerator,
    adapter_of,
    generator_adapter_names,
    read_generator_adapter,
    saved_tensors,
)

ATOL = 2e-4


@pytest.fixture(params=generator_adapter_names())
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_generator_adapter(request.param)


def test_logits_are_those_of_peft(golden: dict[str, Any], tmp_path: Path) -> None:
    generator = AdaptedGenerator(write_golden(tmp_path, golden))
    generator.place(adapter_of(golden))
    for ids, expected in zip(golden["input_ids"], golden["logits"], strict=True):
        np.testing.assert_allclose(generator.last_logits(ids, 1), expected, atol=ATOL)
        assert np.abs(generator.last_logits(ids, 0) - np.array(expected)).max() > 0.01


@pytest.mark.parametrize("name", ["gpt2", "gptj", "opt", "lfm2_moe", "qwen3", "falcon_h1"])
def test_what_is_written_is_what_peft_wrote(name: str, tmp_path: Path) -> None:
    golden = read_generator_adapter(name)
    generator = AdaptedGenerator(write_golden(tmp_path, golden))
    own = generator.layers.of_model(adapter_of(golden), param="adapter")
    assert own.modules.keys() <= dict(generator.loaded.model.named_modules()).keys()
    files = adapter_files(generator.layers.of_checkpoint(own), "peft")
    written = load(files["adapter_model.safetensors"])
    wanted = saved_tensors(golden)
    assert written.keys() == wanted.keys()
    for path, tensor in wanted.items():
        np.testing.assert_allclose(written[path], tensor, rtol=1e-5)
    config, peft = json.loads(files["adapter_config.json"]), golden["adapter_config"]
    for field in ("peft_type", "r", "lora_alpha", "bias", "fan_in_fan_out"):
        assert config[field] == peft.get(field, False), field
    targets = tuple(f".{target}" for target in peft["target_modules"])
    assert all(path.endswith(targets) for path in config["target_modules"])


@pytest.mark.parametrize("name", ["qwen3_embedding", "qwen3_tied", "qwen3_head"])
def test_a_table_that_is_not_the_models_is_refused(name: str, tmp_path: Path) -> None:
    golden = read_generator_adapter(name)
    generator = AdaptedGenerator(write_golden(tmp_path, golden))
    table = f"{PREFIX}model.embed_tokens.base_layer.weight"
    changed = saved_tensors(golden)[table].copy()
    changed[7] += 0.01
    with pytest.raises(InvalidRequestError, match=r"embed_tokens had another weight"):
        generator.place(adapter_of(golden, **{table: changed}))
    with pytest.raises(InvalidRequestError, match=r"embed_tokens had another weight"):
        generator.place(adapter_of(golden, **{table: changed[:-1]}))
    # Rounding to the dtype of training is no difference.
    generator.place(adapter_of(golden, **{table: saved_tensors(golden)[table].astype(np.float16)}))
