"""Scores of known completions, against the embedded model."""

from __future__ import annotations

import math
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

PATH = "/v1/rl/logprobs"
# TOLERANCE: between log-probabilities of decode and of prefill, in float32.
TOLERANCE = 1e-4


def post(server: ServerProcess, status: int = 200, path: str = PATH, **body: Any) -> Any:
    response = httpx2.post(server.url + path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.fixture(scope="module")
def rollout(live_server: ServerProcess) -> Any:
    prompts = ["Once upon a time there was a small", [264, 75, 419] * 15]
    return post(
        live_server,
        path="/v1/rl/rollout",
        prompts=prompts,
        n=4,
        max_tokens=24,
        seed=3,
        temperature=1.5,
        top_logprobs=2,
        entropy=True,
        logprobs_mode="raw_logprobs",
    )


def items_of(rollout: Any) -> list[dict[str, Any]]:
    return [
        {
            "prompt_token_ids": group["prompt_token_ids"],
            "completion_token_ids": sample["token_ids"],
        }
        for group in rollout["groups"]
        for sample in group["samples"]
    ]


# Requests that come together may be divided among engines, which compute a prompt each.
@pytest.mark.one_engine
def test_scores_are_what_sampling_said(live_server: ServerProcess, rollout: Any) -> None:
    samples = [sample for group in rollout["groups"] for sample in group["samples"]]
    answer = post(
        live_server, items=items_of(rollout), top_logprobs=2, entropy=True, cache_salt="fresh"
    )
    assert [item["index"] for item in answer["items"]] == list(range(8))
    for item, sample in zip(answer["items"], samples, strict=True):
        assert item["logprobs"] == pytest.approx(sample["logprobs"], abs=TOLERANCE)
        assert item["entropy"] == pytest.approx(sample["entropy"], abs=TOLERANCE)
        assert item["sum"] == pytest.approx(math.fsum(item["logprobs"]))
        assert item["weight_version"] == "default"
        for ours, theirs in zip(item["top_logprobs"], sample["top_logprobs"], strict=True):
            values = [value for _, value in theirs]
            assert [value for _, value in ours] == pytest.approx(values, abs=TOLERANCE)
    # The first sample of each group computes the prompt; 45 tokens are two blocks and a part.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * 32


def test_scores_do_not_depend_on_the_batch(live_server: ServerProcess, rollout: Any) -> None:
    items = items_of(rollout)
    together = post(live_server, items=items)["items"]
    alone = [post(live_server, items=[item], cache_salt="alone")["items"][0] for item in items[:2]]
    for lone, other in zip(alone, together, strict=False):
        assert lone["logprobs"] == pytest.approx(other["logprobs"], abs=TOLERANCE)


def test_a_trainer_learns_what_to_expect(live_server: ServerProcess) -> None:
    answer = httpx2.get(f"{live_server.url}/v1/rl/capabilities").json()
    (model,) = answer["models"]
    assert model["model"] == "mlx-parallm-demo"
    assert (model["dtype"], model["tolerance"]["bound"]) == ("float32", TOLERANCE)
    assert model["tolerance"]["device"] == "cpu"
    assert (model["weight_version"], model["parent"]) == ("default", None)
    assert model["max_model_len"] == 2048
    assert answer["logprobs_modes"] == ["raw_logprobs", "processed_logprobs"]
    assert answer["max_samples"] == 2048
    assert (answer["pause_modes"], answer["is_paused"]) == (["keep", "wait", "abort"], False)
    # This is the first number beyond the token ids.
    item = {"prompt_token_ids": [1], "completion_token_ids": [model["vocab_size"]]}
    assert post(live_server, 400, items=[item])["error"]["param"] == "items"


ITEM = {"prompt_token_ids": [1, 2], "completion_token_ids": [3]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"items": []}, "items"),
        ({"items": [ITEM | {"completion_token_ids": []}]}, "items"),
        ({"items": [ITEM | {"prompt_token_ids": []}]}, "items"),
        ({"items": [ITEM, ITEM | {"completion_token_ids": [10**6]}]}, "items"),
        ({"items": [ITEM | {"completion_token_ids": [1] * 5000}]}, "items"),
        ({"items": [ITEM | {"more": 1}]}, "items"),
        ({"items": [ITEM] * 2500}, "items"),
        ({"top_logprobs": 10**6}, "top_logprobs"),
    ],
)
def test_a_bad_body_names_its_field(
    live_server: ServerProcess, change: dict[str, Any], param: str
) -> None:
    body: dict[str, Any] = {"items": [ITEM]} | change
    assert post(live_server, 400, **body)["error"]["param"] == param
