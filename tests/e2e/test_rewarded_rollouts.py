"""Rollouts whose samples a reward model of the server reads."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.scoring_server import post, refusal
from tests.server_process import ServerProcess

CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
PROMPTS: list[Any] = [
    "1, 2, 3,",
    CHAT,
    [1, 40, 41],
    {"text": "1, 2,", "reward_prompt": "w20 "},
    {"messages": CHAT, "reward_prompt": [{"role": "user", "content": "w20 w21"}]},
]


@pytest.fixture
def server(scoring_server: ServerProcess) -> ServerProcess:
    return scoring_server


def what_was_read(prompt: Any, text: str, token_text: str) -> dict[str, Any]:
    """Return the fields of a request for the reward of a sample."""
    before: Any = prompt["reward_prompt"] if isinstance(prompt, dict) else prompt
    if isinstance(before, str):
        return {"texts": [before + text]}
    if isinstance(before[0], int):
        return {"texts": [token_text + text]}
    return {"prompt": before, "completions": [text]}


@pytest.mark.parametrize("streams", [False, True])
def test_rollouts_come_with_their_rewards(server: ServerProcess, streams: bool) -> None:
    body: dict[str, Any] = {"prompts": PROMPTS, "n": 2, "max_tokens": 6, "seed": 1}
    body |= {"model": "demo", "reward_model": {"model": "reward", "sigmoid": True}}
    samples = rollout_samples(server, body, streams=streams)
    assert len(samples) == 2 * len(PROMPTS)
    ids = {"tokens": PROMPTS[2], "model": "demo"}
    token_text = post(server, "/detokenize", ids)["prompt"]
    for number, sample in samples:
        assert sample["reward_error"] is None
        read = what_was_read(PROMPTS[number], sample["text"], token_text)
        wanted = post(server, "/v1/rewards/score", {**read, "model": "reward", "sigmoid": True})[
            "data"
        ][0]["reward"]
        assert sample["reward"] == pytest.approx(wanted, abs=1e-4)


def rollout_samples(
    server: ServerProcess, body: dict[str, Any], *, streams: bool
) -> list[tuple[int, dict[str, Any]]]:
    """Return the samples, each with the number of its prompt."""
    if not streams:
        groups = post(server, "/v1/rl/rollout", body)["groups"]
        return [(group["index"], sample) for group in groups for sample in group["samples"]]
    answer = httpx2.post(f"{server.url}/v1/rl/rollout", json={**body, "stream": True})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events[-1]["type"] == "usage"
    return [(event["prompt_index"], event) for event in events if event["type"] == "sample"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("model", "why"), [("broken", "NaN or inf"), ("cross", "maximum context")])
def test_samples_outlive_their_reward_model(
    server: ServerProcess, model: str, why: str, streams: bool
) -> None:
    prompts = [{"text": "1, 2,", "reward_prompt": "w20 " * (50 if model == "cross" else 1)}, "1,"]
    body: dict[str, Any] = {"prompts": prompts, "n": 2, "max_tokens": 4, "model": "demo"}
    samples = rollout_samples(server, {**body, "reward_model": {"model": model}}, streams=streams)
    assert len(samples) == 4
    for number, sample in samples:
        assert sample["token_ids"]
        if model == "broken" or number == 0:
            assert sample["reward"] is None
            assert why in sample["reward_error"]
        else:
            assert isinstance(sample["reward"], float)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reward_model": {"model": "no"}}, "reward_model"),
        ({"reward_model": {"model": "demo"}}, "reward_model"),
        ({"reward_model": {"model": "three"}}, "reward_model"),
        ({"reward_model": {}}, "reward_model"),
        ({"reward_model": "reward"}, "reward_model"),
        ({"reward_model": {"model": "reward", "truncate_prompt_tokens": 41}}, "reward_model"),
        ({"reward_model": {"model": "cross"}, "prompts": [CHAT]}, "prompts"),
        ({"reward_model": {"model": "cross"}, "verifier": {"url": "http://a"}}, "reward_model"),
        (
            {
                "reward_model": {"model": "reward"},
                "prompts": [{"text": "a", "reward_prompt": [{"role": "king", "content": "b"}]}],
            },
            "prompts",
        ),
    ],
)
def test_bad_reward_models_are_refused_before_anything_is_sampled(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    request = {"prompts": ["1, 2,"], "max_tokens": 4, "model": "demo", **body}
    status = 404 if body["reward_model"] == {"model": "no"} else 400
    assert refusal(server, "/v1/rl/rollout", request, status)["param"] == param
