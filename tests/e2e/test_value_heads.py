"""Values over HTTP: of a critic and of adapters with heads, cached and batched, after updates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest

from mlx_parallm.client.tensors import encode_safetensors
from tests.server_process import ServerProcess
from tests.value_heads import (
    SCORE,
    TRL,
    Reference,
    Tensors,
    head_tensors,
    peft_adapter,
    peft_config,
    write_critic,
)

# TOLERANCE: of values; TRL's own heads begin with weights as small as these.
TOLERANCE = 1e-5
RAW = {"content-type": "application/octet-stream", "authorization": "Bearer admin"}
PROMPTS = ["Once upon a time there was a small", [264, 75, 419] * 15]
ROLLOUT: dict[str, Any] = {
    "prompts": PROMPTS,
    "n": 2,
    "max_tokens": 8,
    "seed": 1,
    "temperature": 1.5,
}
HEAD = head_tensors(1)
#: ADAPTERS: the seed of the factors and the head of each adapter; None: it brings no head.
ADAPTERS: Mapping[str, tuple[int, Tensors | None]] = {
    "first": (1, head_tensors(2)),
    "second": (2, head_tensors(3, SCORE, has_bias=False)),
    "plain": (3, None),
}


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_critic(tmp_path_factory.mktemp("critic"), HEAD)
    server = ServerProcess(
        "--model", str(folder), "--served-model-name", "critic", "--max-num-seqs", "32",
        "--max-model-len", "512", "--max-loras", "3", "--client-timeout", "0",
        "--admin-api-key", "admin",
    )  # fmt: skip
    server.wait_until_ready()
    yield server
    server.stop()


def post(server: ServerProcess, path: str, status: int = 200, **body: Any) -> httpx2.Response:
    response = httpx2.post(server.url + path, json=body, timeout=None)
    assert response.status_code == status, response.text
    return response


def upload(server: ServerProcess, name: str, head: Tensors | None, seed: int) -> httpx2.Response:
    saved = sorted({tensor.split(".")[0] for tensor in head or {}})
    params = {"name": name, "config": json.dumps(peft_config(*saved))}
    path = f"{server.url}/v1/update_adapter_weights"
    return httpx2.post(
        path, content=peft_adapter(seed, head), params=params, headers=RAW, timeout=None
    )


def rollout(server: ServerProcess, **body: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """Return the samples of a rollout, each behind its prompt."""
    fields: dict[str, Any] = ROLLOUT | {"return": ["values"]} | body
    answer = post(server, "/v1/rl/rollout", **fields).json()
    groups = answer["groups"]
    return [(group["prompt_token_ids"], each) for group in groups for each in group["samples"]]


def asked(server: ServerProcess, **body: Any) -> tuple[list[Any], Any]:
    """Return the samples of a rollout, and the answer with the scores of all."""
    samples = rollout(server, **body)
    items = [
        {"prompt_token_ids": prompt, "completion_token_ids": each["token_ids"]}
        for prompt, each in samples
    ]
    answer = post(server, "/v1/rl/logprobs", items=items, return_values=True, **body).json()
    return samples, answer


def check(answers: tuple[list[Any], Any], reference: Reference, head: Tensors) -> None:
    """Check the values of samples and of their scores."""
    for (prompt, sample), item in zip(answers[0], answers[1]["items"], strict=True):
        wanted = reference.values(head, prompt, sample["token_ids"])
        np.testing.assert_allclose(sample["value_estimates"], wanted, atol=TOLERANCE)
        np.testing.assert_allclose(item["value_estimates"], wanted, atol=TOLERANCE)
        assert len(item["logprobs"]) == len(wanted)


def test_values_are_those_of_the_head_with_cached_prefixes_too(critic: ServerProcess) -> None:
    rounds = [asked(critic, cache_salt="fresh") for _ in range(2)]
    reference = Reference()
    for each in rounds:
        check(each, reference, HEAD)
    counts = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for _, each in rounds]
    assert min(counts) > 0
    plain = rollout(critic, **{"return": None})
    assert all("value_estimates" not in sample for _, sample in plain)


def test_a_stream_has_the_values_of_each_sample(critic: ServerProcess) -> None:
    wanted = {
        tuple(sample["token_ids"]): sample["value_estimates"] for _, sample in rollout(critic)
    }
    answer = post(critic, "/v1/rl/rollout", stream=True, return_values=True, **ROLLOUT)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    samples = [event for event in events if event["type"] == "sample"]
    assert len(samples) == 4
    for sample in samples:
        values = wanted[tuple(sample["token_ids"])]
        np.testing.assert_allclose(sample["value_estimates"], values, atol=TOLERANCE)


def test_each_row_has_the_head_of_its_adapter(critic: ServerProcess) -> None:
    for name, (seed, head) in ADAPTERS.items():
        answer = upload(critic, name, head, seed)
        assert answer.status_code == 200, answer.text
    cases = {name: (Reference(seed), head or HEAD) for name, (seed, head) in ADAPTERS.items()}
    cases["critic"] = Reference(), HEAD
    with ThreadPoolExecutor() as pool:
        begun = {name: pool.submit(asked, critic, model=name) for name in cases}
        answers = {name: each.result() for name, each in begun.items()}
    for name, (reference, head) in cases.items():
        check(answers[name], reference, head)
    # A new version brings another head, and then none.
    assert upload(critic, "first", HEAD, 1).status_code == 200
    check(asked(critic, model="first"), cases["first"][0], HEAD)
    assert upload(critic, "second", None, 2).status_code == 200
    check(asked(critic, model="second"), cases["second"][0], HEAD)
    for name in ADAPTERS:
        httpx2.delete(f"{critic.url}/v1/adapters/{name}", headers=RAW)


def test_updates_change_states_and_the_head(critic: ServerProcess) -> None:
    width = head_tensors(0)[f"{TRL}.weight"].shape[1]
    norm = np.random.default_rng(5).normal(1, 0.2, width).astype(np.float32)
    changed, head = {"model.norm.weight": norm}, head_tensors(7)
    reference = Reference(changed=changed)
    path = f"{critic.url}/update_weights"
    for tensors, values in ((changed, HEAD), (head, head)):
        data = encode_safetensors(tensors)
        answer = httpx2.post(path, content=data, headers=RAW, timeout=None)
        assert answer.status_code == 200, answer.text
        check(asked(critic), reference, values)
    too_many = {f"{TRL}.weight": np.repeat(head[f"{TRL}.weight"], 2, axis=0)}
    answer = httpx2.post(path, content=encode_safetensors(too_many), headers=RAW, timeout=None)
    assert answer.status_code == 400
    check(asked(critic), reference, head)


ITEM = {"prompt_token_ids": [1, 2], "completion_token_ids": [3]}
BODIES = {
    "/v1/rl/rollout": {"prompts": ["Once"], "max_tokens": 2},
    "/v1/rl/logprobs": {"items": [ITEM]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", [{"return": ["values"]}, {"return_values": True}])
def test_without_a_head_the_field_is_refused(
    live_server: ServerProcess, path: str, fields: dict[str, Any]
) -> None:
    error = post(live_server, path, 400, **BODIES[path], **fields).json()["error"]
    assert error["param"] == "return"
    assert "mlx-parallm-demo has no value head" in error["message"]
    off: dict[str, Any] = {"return": []} if "return" in fields else {"return_values": False}
    assert "value_estimates" not in post(live_server, path, **BODIES[path], **off).text


@pytest.mark.parametrize("path", BODIES)
def test_other_things_to_return_are_refused(live_server: ServerProcess, path: str) -> None:
    error = post(live_server, path, 400, **BODIES[path], **{"return": ["dist"]}).json()["error"]
    assert error["param"].startswith("return")


@pytest.mark.parametrize(
    "head",
    [
        {name: np.repeat(each, 2, axis=0) for name, each in head_tensors(1).items()},
        {"lm_head.weight": np.ones((4, 4), np.float32)},
        head_tensors(1) | {"lm_head.weight": np.ones((4, 4), np.float32)},
        {f"{TRL}.weight": np.ones((1, 3), np.float32)},
    ],
    ids=["two labels", "another layer", "and another layer", "another width"],
)
def test_an_adapters_bad_head_is_refused(critic: ServerProcess, head: Tensors) -> None:
    answer = upload(critic, "bad", head, 1)
    assert answer.status_code == 400, answer.text
    assert "does not fit" in answer.text
