"""Rewards over HTTP, by small models."""

from __future__ import annotations

import math
from typing import Any

import httpx2
import pytest

from mlx_parallm.client import RLClient
from tests.scoring_server import post, refusal, scores
from tests.server_process import ServerProcess


@pytest.fixture
def server(scoring_server: ServerProcess) -> ServerProcess:
    return scoring_server


def logits_of(server: ServerProcess, ids: list[list[int]]) -> list[float]:
    """Return the reward model's logits."""
    body = {"input": ids, "model": "reward", "use_activation": False}
    return [entry["probs"][0] for entry in post(server, "/classify", body)["data"]]


def test_rewards_of_texts_and_conversations(server: ServerProcess) -> None:
    plain = post(server, "/v1/rewards/score", {"texts": ["w20 w21", "w44"], "model": "reward"})
    wanted = logits_of(server, [[2, 20, 21, 3], [2, 44, 3]])
    assert scores(plain["data"], "reward") == pytest.approx(wanted, abs=1e-4)
    assert plain["usage"]["prompt_tokens"] == 7
    chats = [
        [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w21 w22"}],
        [{"role": "user", "content": "w30"}],
    ]
    body = {"chats": chats, "model": "reward"}
    wanted = logits_of(server, [[90, 20, 91, 21, 22], [90, 30]])
    entries = post(server, "/v1/rewards/score", body)["data"]
    assert scores(entries, "reward") == pytest.approx(wanted, abs=1e-4)
    shares = post(server, "/rewards/score", {**body, "sigmoid": True})["data"]
    logistic = [1 / (1 + math.exp(-logit)) for logit in wanted]
    assert scores(shares, "reward") == pytest.approx(logistic, abs=1e-4)


def test_rewards_of_completions(server: ServerProcess) -> None:
    body = {"prompt": "w20 ", "completions": ["w21", "w22 w23"], "model": "reward"}
    entries = post(server, "/v1/rewards/score", body)["data"]
    wanted = logits_of(server, [[2, 20, 21, 3], [2, 20, 22, 23, 3]])
    assert scores(entries, "reward") == pytest.approx(wanted, abs=1e-4)
    chat = [{"role": "user", "content": "w20"}]
    turns = [{"role": "assistant", "content": "w23"}]
    several = [
        {"prompt": chat, "completions": ["w21", turns]},
        {"prompt": "w20 ", "completions": ["w21"]},
    ]
    entries = post(server, "/v1/rewards/score", {"prompts": several, "model": "reward"})["data"]
    assert [(entry["prompt_index"], entry["index"]) for entry in entries] == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    wanted = logits_of(server, [[90, 20, 91, 21], [90, 20, 91, 23], [2, 20, 21, 3]])
    assert [entry["reward"] for entry in entries] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("token", ["w50", 50])
def test_rewards_of_steps(server: ServerProcess, token: str | int) -> None:
    texts = ["w20 w50 w21 w50", "w50"]
    body = {"texts": texts, "step_token": token, "sigmoid": True}
    answer = post(server, "/v1/rewards/score", body)
    assert answer["model"] == "steps"
    first, second = (entry["steps"] for entry in answer["data"])
    assert (len(first), len(second)) == (2, 1)
    alone = post(server, "/v1/rewards/score", {**body, "texts": texts[:1], "sigmoid": False})
    (raw,) = alone["data"]
    assert [1 / (1 + math.exp(-logit)) for logit in raw["steps"]] == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": "w5"}, "texts"),
        ({"texts": [5]}, "texts"),
        ({"texts": ["w5"], "chats": [[{"role": "user", "content": "w5"}]]}, "chats"),
        ({"texts": ["w5"] * 10_000}, "texts"),
        ({"texts": ["w5 " * 350_000]}, "texts"),
        ({"texts": ["w5"], "model": "three"}, "model"),
        ({"texts": ["w5"], "model": "embedder"}, "model"),
        ({"texts": ["w5"], "prompt": "w5"}, "texts"),
        ({"prompt": "w5"}, "texts"),
        ({"completions": ["w5"]}, "completions"),
        ({"prompt": "w5", "completions": []}, "completions"),
        ({"prompt": "w5", "completions": [[{"role": "user", "content": "a"}]]}, "completions"),
        ({"prompts": [{"prompt": "a", "completions": ["w5"] * 5000}] * 2}, "prompts"),
        ({"prompts": [{"prompt": "a"}]}, "prompts"),
        ({"chats": [[{"role": "king", "content": "a"}]], "model": "reward"}, "chats"),
        ({"chats": [[{"role": "user", "content": "a"}]], "model": "cross"}, "chats"),
        ({"chats": [[]], "model": "reward"}, "chats"),
        ({"texts": ["w5"], "step_token": "no such"}, "step_token"),
        ({"texts": ["w5"], "step_token": 10**9}, "step_token"),
        ({"texts": ["w50", "w5"], "step_token": "w50"}, "texts"),
        ({"texts": ["w50"], "step_token": "w50", "model": "reward"}, "model"),
        ({"texts": ["w5"], "step_token": "w5", "truncate_prompt_tokens": 9}, "truncate"),
        ({"texts": ["w5"], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_bad_rewards_name_the_field(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    assert refusal(server, "/v1/rewards/score", body)["param"].startswith(param)


def test_reward_models_are_told(server: ServerProcess) -> None:
    models = httpx2.get(f"{server.url}/v1/rl/capabilities").json()["reward_models"]
    assert models == ["cross", "logits", "broken", "reward"]


async def test_the_clients_rewards(server: ServerProcess) -> None:
    async with RLClient(server.url) as client:
        first, second = await client.rewards(["w20", "w21 w22"], model="reward")
        assert [first, second] == pytest.approx(
            logits_of(server, [[2, 20, 3], [2, 21, 22, 3]]), abs=1e-4
        )
        (chat,) = await client.rewards([[{"role": "user", "content": "w20"}]], model="reward")
        assert chat == pytest.approx(logits_of(server, [[90, 20]])[0], abs=1e-4)
        rollout = await client.rollout(
            ["1, 2,"], model="demo", max_tokens=4, reward_model={"model": "reward"}
        )
        (sample,) = rollout.samples
        assert isinstance(sample.reward, float)
        assert sample.reward_error is None
        streamed = client.stream_rollout(
            ["1, 2,"], model="demo", max_tokens=4, reward_model={"model": "broken"}
        )
        (sample,) = [streamed_sample async for streamed_sample in streamed]
        assert sample.reward is None
        assert "infinite values" in (sample.reward_error or "")
