"""Adapters in process: ``LLM.load_adapter`` and ``generate(…, adapter=…)``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError, NotFoundError

PROMPT = list(range(50, 90))
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}


def adapted(seed: int) -> nn.Module:
    """Return the embedded model with a random LoRA, made by mlx_lm."""
    loaded: Any = utils.load_model(DEMO_FOLDER)
    whole, _ = loaded
    model: Any = utils.dequantize_model(whole)
    model.set_dtype(mx.float32)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), LORA)
    keys = iter(mx.random.split(mx.random.key(seed), 200))

    def draw(_path: str, value: mx.array) -> mx.array:
        return mx.random.normal(value.shape, key=next(keys)) * 0.05

    return model.update(tree_map_with_path(draw, model.trainable_parameters()))


def save(model: nn.Module, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tensors: Any = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def expected_logprobs(model: nn.Module) -> np.ndarray:
    logits = model(mx.array([PROMPT[:-1]]))[0]
    logprobs = nn.log_softmax(logits, axis=-1)
    return np.array(mx.take_along_axis(logprobs, mx.array(PROMPT[1:])[:, None], -1)[:, 0])


def scored(llm: LLM, adapter: Any = None, num_prompts: int = 1) -> list[np.ndarray]:
    outputs = llm.generate([PROMPT] * num_prompts, SCORED, adapter=adapter)
    return [
        np.array([entry.logprob for entry in output.prompt_logprobs or () if entry])
        for output in outputs
    ]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_each_prompt_has_the_adapter_it_names(llm: LLM, tmp_path: Path) -> None:
    models = {"one": adapted(1), "two": adapted(2)}
    for name, model in models.items():
        info = llm.load_adapter(name, save(model, tmp_path / name))
        assert (info.name, info.version, info.rank) == (name, "1", 4)
    base = scored(llm)[0]
    mixed = scored(llm, ["two", None, "one", "two"], 4)
    first, second = (expected_logprobs(models[name]) for name in ("one", "two"))
    assert np.abs(first - second).max() > 0.1
    assert np.abs(first - base).max() > 0.1
    for actual, expected in zip(mixed, (second, base, first, second), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    np.testing.assert_allclose(scored(llm, "one", 2), [first, first], atol=1e-4)


def test_a_replaced_adapter_is_another(llm: LLM, tmp_path: Path) -> None:
    llm.load_adapter("policy", save(adapted(3), tmp_path))
    before = llm.generate([PROMPT], SCORED, adapter="policy")
    model = adapted(4)
    assert llm.load_adapter("policy", save(model, tmp_path), version="step-2").version == "step-2"
    np.testing.assert_allclose(scored(llm, "policy")[0], expected_logprobs(model), atol=1e-4)
    assert len(before) == 1


def test_what_is_wrong_is_told_and_the_rest_goes_on(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        llm.generate([PROMPT], SCORED, adapter="nobody")
    with pytest.raises(InvalidRequestError, match="2 entries for 1 prompts"):
        llm.generate([PROMPT], SCORED, adapter=["a", "b"])
    with pytest.raises(InvalidRequestError, match=r"adapter_config\.json"):
        llm.load_adapter("gone", tmp_path)
    with pytest.raises(NotFoundError):
        llm.unload_adapter("gone")
    llm.load_adapter("gone", save(adapted(5), tmp_path))
    llm.unload_adapter("gone")
    with pytest.raises(ModelNotFoundError):
        llm.generate([PROMPT], SCORED, adapter="gone")
    assert llm.generate([PROMPT], SCORED)[0].outputs[0].finish_reason == "length"
