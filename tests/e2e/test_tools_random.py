"""A model of random weights calls tools correctly when it must."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.server_process import ServerProcess

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "count": {"type": "integer", "minimum": 0, "maximum": 99},
                    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
                    "text": {"type": "string", "maxLength": 8},
                },
                "required": ["count", "tags", "text"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("first", "second")
]


def save_random(folder: Path) -> None:
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | SMALL
    config.pop("quantization")
    config.pop("quantization_config")
    # Of these weights all 8 samples make several calls: no rounding leaves none that does.
    mx.random.seed(8)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("random")
    save_random(folder)
    server = ServerProcess("--model", str(folder), "--served-model-name", "random")
    server.wait_until_ready()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.stop()


@pytest.mark.parametrize(
    ("choice", "names", "finish"),
    [
        ("required", {"first", "second"}, "tool_calls"),
        ({"type": "function", "function": {"name": "second"}}, {"second"}, "stop"),
    ],
)
def test_forced_calls_are_valid(
    client: openai.OpenAI, choice: Any, names: set[str], finish: str
) -> None:
    answer = client.chat.completions.create(
        model="random",
        messages=[{"role": "user", "content": "hi"}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=1,
        seed=1,
        n=8,
    )
    for one in answer.choices:
        assert (one.finish_reason, one.message.content) == (finish, None)
        (call,) = one.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in names
        given = json.loads(call.function.arguments)
        assert set(given) == {"count", "tags", "text"}
        assert 0 <= given["count"] <= 99
        assert set(given["tags"]) <= {"a", "b"}
        assert len(given["tags"]) <= 3
        assert len(given["text"]) <= 8


def test_of_parallel_calls_all_but_a_cut_one_are_valid(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="random",
        messages=[{"role": "user", "content": "hi"}],
        tools=TOOLS,
        tool_choice="required",
        temperature=1,
        seed=1,
        n=8,
        max_tokens=300,
    )
    found = [one.message.tool_calls or [] for one in answer.choices]
    assert any(len(calls) > 1 for calls in found)
    for one, calls in zip(answer.choices, found, strict=True):
        for call in calls[:-1] if one.finish_reason == "length" else calls:
            assert call.type == "function"
            assert set(json.loads(call.function.arguments)) == {"count", "tags", "text"}
