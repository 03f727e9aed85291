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
    # With these weights all 8 samples make several calls, so rounding cannot leave none that does.
    mx.random.seed(8)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("random")
    save_random(folder)
    server = ServerProcess("--model", str(folder), "--served-model-name", "random")
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


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
    for sample in answer.choices:
        assert (sample.finish_reason, sample.message.content) == (finish, None)
        (call,) = sample.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"count", "tags", "text"}
        assert 0 <= arguments["count"] <= 99
        assert set(arguments["tags"]) <= {"a", "b"}
        assert len(arguments["tags"]) <= 3
        assert len(arguments["text"]) <= 8


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
    calls_of_choices = [choice.message.tool_calls or [] for choice in answer.choices]
    assert any(len(calls) > 1 for calls in calls_of_choices)
    for choice, calls in zip(answer.choices, calls_of_choices, strict=True):
        for call in calls[:-1] if choice.finish_reason == "length" else calls:
            assert call.type == "function"
            assert set(json.loads(call.function.arguments)) == {"count", "tags", "text"}
