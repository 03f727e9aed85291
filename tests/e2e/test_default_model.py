"""Requests without a model go to the first of their route's kind, which the answer names."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine, serve_fake

FIRST = "org/fake"
HI = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/rl/rollout": {"prompts": ["hi"]},
    "/v1/chat/completions/render": {"messages": HI},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}
# The answers of these routes name no model, or name it differently.
NAMELESS: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/completions/render": {"prompt": "hi"},
    "/apply-template": {"messages": HI},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
    "/generate": {"text": "hi"},
    "/inference/v1/generate": {"token_ids": [65], "sampling_params": {}},
}
# These routes name a model that is not served yet, that they unload, or that is to be trained.
# Open Responses wants the last one to require a model.
NAMING = {
    "/v1/models/load",
    "/v1/models/unload",
    "/v1/training/sessions",
    "/v1/fine_tuning/jobs",
    "/v1/responses/compact",
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(engine: FakeEngine, tmp_path: Path) -> Iterator[str]:
    with serve_fake(engine, ServerConfig(data_dir=str(tmp_path / "data"))) as url:
        yield url


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("absent", [{}, {"model": None}])
def test_the_first_that_generates_answers(
    url: str, engine: FakeEngine, path: str, absent: dict[str, Any]
) -> None:
    response = httpx2.post(url + path, json=ASKED[path] | absent)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == FIRST
    if not path.endswith("render"):
        assert engine.submitted.get().model == FIRST


class StandingIn(FakeEngine):
    """Answers for any name that begins as those of other services."""

    def find(self, name: str) -> ModelStatus | None:
        return super().find(FIRST if name.startswith("gpt-") else name)


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_names_the_model_that_stands_for_another(path: str, tmp_path: Path) -> None:
    with serve_fake(StandingIn(), ServerConfig(data_dir=str(tmp_path))) as url:
        response = httpx2.post(url + path, json=ASKED[path] | {"model": "gpt-4o"})
    assert (response.status_code, response.json()["model"]) == (200, FIRST)


@pytest.mark.parametrize("path", NAMELESS)
def test_it_answers_where_the_answer_has_no_model(url: str, path: str) -> None:
    response = httpx2.post(url + path, json=NAMELESS[path])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_of_a_stream_names_it(url: str, path: str) -> None:
    text = httpx2.post(url + path, json=ASKED[path] | {"stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert chunks
    assert {chunk["model"] for chunk in chunks} == {FIRST}


def test_the_first_event_of_messages_and_responses_names_it(url: str) -> None:
    for path in ("/v1/messages", "/v1/responses"):
        text = httpx2.post(url + path, json=ASKED[path] | {"stream": True}).text
        first = json.loads(text.split("data: ", 1)[1].split("\n\n", 1)[0])
        assert (first.get("message") or first["response"])["model"] == FIRST


def test_lines_of_a_batch_need_no_model(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        line = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": HI},
        }
        lines = io.BytesIO(json.dumps(line).encode())
        file = client.files.create(file=("lines.jsonl", lines), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while client.batches.retrieve(batch.id).status not in ("completed", "failed"):
            pass
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        answer = json.loads(client.files.content(output).text)
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["model"] == FIRST


def test_no_body_requires_a_model(tmp_path: Path) -> None:
    config = ServerConfig(data_dir=str(tmp_path))
    document = make_app(FakeEngine(), config).openapi()
    requiring = {
        path
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if requires_model(operation, document["components"]["schemas"])
    }
    assert requiring == NAMING


def requires_model(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> bool:
    """True if some form of the operation's body must have the field ``model``."""
    content = operation.get("requestBody", {}).get("content", {})
    forms = [entry.get("schema", {}) for entry in content.values()]
    while forms:
        form = forms.pop()
        if "$ref" in form:
            form = schemas[form["$ref"].rsplit("/", 1)[1]]
        if "model" in form.get("required", ()):
            return True
        forms += form.get("anyOf", [])
    return False
