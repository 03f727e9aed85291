"""The shipped model: its size, its files, and the quality that its card states."""

import json
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from demo.evaluate import Evaluator, held_out
from mlx_parallm.demo_models.folders import DEMO_FOLDER

pytestmark = pytest.mark.slow

EIGHT_MB = 8 * 1024 * 1024


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(DEMO_FOLDER, thinking=True)


def test_the_shipped_files_are_complete_and_small():
    files = {file.name: file.stat().st_size for file in DEMO_FOLDER.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= EIGHT_MB


def test_config_has_the_promised_form():
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["head_dim"] == 64
    assert config["quantization"]["bits"] == 8
    assert config["vocab_size"] <= 4096
    assert config["max_position_embeddings"] >= 4096


def test_mlx_lm_loads_it_and_recognises_tools_and_thinking():
    loaded: Any = load(str(DEMO_FOLDER))
    model, tokenizer = loaded
    assert len(make_prompt_cache(model)) == len(model.layers)
    assert tokenizer.has_thinking
    assert tokenizer.has_tool_calling
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("task", ["two_digit_addition", "sort_numbers", "memory", "extract_json"])
def test_held_out_problems_are_mostly_right(evaluator: Evaluator, task: str):
    assert evaluator.score(held_out(task, 16, seed=5)).right >= 14


def test_tool_calls_are_valid(evaluator: Evaluator):
    assert evaluator.valid_calls(held_out("tool_call", 16, seed=5)).right >= 15
