"""ART's in-flight updates against the embedded model: spans show where the policy changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from tests import adapter_files
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

SLOT = "policy:active"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    for step in (0, 1, 2):
        adapter_files.save(root / str(step), step)
    return root


@pytest.fixture(scope="module")
def server(roots: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(
        "--max-num-seqs", "4", "--max-model-len", "512", "--allowed-adapter-roots", str(roots)
    )
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url) as client:
        yield client
        for card in client.get("/v1/adapters").json()["data"]:
            client.delete(f"/v1/adapters/{card['name']}")


def update(http: httpx2.Client, roots: Path, step: int, expected: int) -> httpx2.Response:
    body = {
        # An id that is sent again is answered as before.
        "operation_id": str(uuid4()),
        "model_name": SLOT,
        "lora_slot": SLOT,
        "lora_path": str(roots / str(step)),
        "generation_id": f"policy@{step}",
        "expected_generation_id": f"policy@{expected}",
        "policy_version": step,
    }
    return http.post("/art/in_flight_lora_update", json=body)


def chat(count: int) -> dict[str, Any]:
    """Return a greedy answer to a request such as ART's."""
    return {
        "model": SLOT,
        "messages": [{"role": "user", "content": "qz vx: tell me more!"}],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        "nvext": {"extra_fields": ["engine_data"]},
    }


def whole(http: httpx2.Client, count: int, **more: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={**chat(count), **more})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def scores(choice: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in choice["logprobs"]["content"]]


def streamed(http: httpx2.Client, count: int) -> Iterator[dict[str, Any]]:
    """Return the chunks of a streamed answer."""
    body = {**chat(count), "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_an_update_meets_a_running_request(http: httpx2.Client, roots: Path) -> None:
    assert update(http, roots, 0, 0).is_success
    before = whole(http, 8)
    assert [span["generation_id"] for span in before["policy_token_spans"]] == ["policy@0"]
    chunks = streamed(http, 400)
    first = next(chunks)
    # The request's prompt is computed, and it is far from its end.
    while not next(chunks)["choices"][0]["token_ids"]:
        pass
    assert http.post("/pause?mode=keep").is_success
    assert update(http, roots, 1, 0).json()["update_seq"] == 2
    assert http.post("/resume").is_success
    *_, last = chunks
    choice = last["choices"][0]
    spans = choice["policy_token_spans"]
    assert [span["generation_id"] for span in spans] == ["policy@0", "policy@1"]
    assert [span["policy_version"] for span in spans] == [0, 1]
    assert [span["update_seq"] for span in spans] == [1, 2]
    assert {span["lora_slot"] for span in spans} == {SLOT}
    assert (spans[0]["start_token"], spans[1]["end_token"]) == (0, 400)
    assert spans[0]["end_token"] == spans[1]["start_token"]
    (prompt,) = choice["prompt_policy_token_spans"]
    assert (prompt["start_token"], prompt["generation_id"]) == (1, "policy@0")
    assert prompt["end_token"] == len(first["prompt_token_ids"])
    # The tokens are those of that step's adapter when it is loaded by another name.
    after = whole(http, 8)
    body = {"lora_name": "policy:eval@1", "lora_path": str(roots / "1")}
    assert http.post("/v1/load_lora_adapter", json=body).is_success
    exact = whole(http, 8, model="policy:eval@1")
    assert scores(after) == pytest.approx(scores(exact), abs=1e-4)
    assert scores(after) != pytest.approx(scores(before), abs=1e-2)
    assert exact["policy_token_spans"][0]["policy_version"] == 1


def test_a_refused_update_leaves_the_policy(http: httpx2.Client, roots: Path) -> None:
    assert update(http, roots, 0, 0).is_success
    assert update(http, roots, 1, 0).is_success
    assert update(http, roots, 2, 0).status_code == 412
    (roots / "3").mkdir()
    for root, step, status in ((roots, 3, 400), (roots, 4, 404), (roots.parent, 5, 400)):
        response = update(http, root, step, 1)
        assert (response.status_code, response.json()["error"]["param"]) == (status, "lora_path")
    assert whole(http, 1)["policy_token_spans"][0]["generation_id"] == "policy@1"
