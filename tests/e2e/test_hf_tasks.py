"""Hugging Face's task form, by its own client, against what transformers' pipelines answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.server_process import ServerProcess
from tests.task_folders import assert_alike, golden_pipelines, write_task_model

PIPELINES = golden_pipelines()
NAMES = [f"org/model-{number}" for number in range(len(PIPELINES))]
CALLS = [
    pytest.param(name, one["task"], call, id=f"{one['encoder']}-{number}")
    for name, one in zip(NAMES, PIPELINES, strict=True)
    for number, call in enumerate(one["calls"])
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folders = [
        write_task_model(tmp_path_factory.mktemp("model"), one["encoder"], one["config"])
        for one in PIPELINES
    ]
    names = [f"{folder}={name}" for folder, name in zip(folders, NAMES, strict=True)]
    process = ServerProcess("--model", *map(str, folders), "--served-model-name", *names)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def client(server: ServerProcess, name: str | None = None) -> InferenceClient:
    return InferenceClient(model=server.url if name is None else f"{server.url}/models/{name}")


def told(one: Any) -> dict[str, Any]:
    """What of an element of the client's answers was there."""
    return {key: value for key, value in dict(one).items() if value is not None}


def post(server: ServerProcess, path: str, body: Any) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("name", "task", "call"), CALLS)
def test_answers_are_those_of_transformers(
    server: ServerProcess, name: str, task: str, call: dict[str, Any]
) -> None:
    body = {"inputs": call["inputs"], "parameters": call["parameters"]}
    assert_alike(post(server, f"/models/{name}", body), call["answer"])
    if call is PIPELINES[0]["calls"][0]:
        for path in (f"/pipeline/{task}/{name}", f"/models/{name}/pipeline/{task}"):
            assert_alike(post(server, path, body), call["answer"])


def test_fill_mask(server: ServerProcess) -> None:
    call = PIPELINES[0]["calls"][5]
    found = client(server).fill_mask(call["inputs"], **call["parameters"])
    assert_alike([told(one) for one in found], call["answer"])
    roberta = PIPELINES[1]["calls"][1]
    # The text has the mask of another model than the first.
    found = client(server).fill_mask(roberta["inputs"], top_k=3)
    assert [one.token for one in found] == [one["token"] for one in roberta["answer"]]


def test_targets_that_are_no_tokens_are_told(server: ServerProcess) -> None:
    body = {"inputs": "a [MASK]", "parameters": {"targets": ["happiness\u00e9", "cat"]}}
    answer = httpx2.post(f"{server.url}/models/{NAMES[0]}", json=body)
    warning = r"'happiness\xe9' is not in the vocabulary; its first token '[UNK]' is used."
    assert answer.headers["x-warnings"] == warning


def test_a_text_without_a_mask_is_refused(server: ServerProcess) -> None:
    with pytest.raises(HfHubHTTPError, match=r"inputs 0 has no \[MASK\]") as refusal:
        client(server, NAMES[0]).fill_mask("the cat")
    assert refusal.value.response.status_code == 400
