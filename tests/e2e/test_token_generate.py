"""vLLM's route from tokens to tokens, against the embedded model."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
PATH = "/inference/v1/generate"


def post(server: ServerProcess, **body: Any) -> Any:
    response = httpx2.post(server.url + PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def ids_of(server: ServerProcess, text: str) -> list[int]:
    return httpx2.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]


def stream(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    body |= {"stream": True}
    response = httpx2.post(server.url + PATH, json=body)
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_what_the_train_client_of_verifiers_reads(live_server: ServerProcess) -> None:
    """Send the body of renderers 0.1.12, and check the answer as it does."""
    prompt = ids_of(
        live_server, "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    eos = ids_of(live_server, "<|im_end|>")
    params = {
        "stop_token_ids": eos,
        "logprobs": 1,
        "skip_special_tokens": False,
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": 64,
        "routed_experts_prompt_start": 3,
    }
    response = httpx2.post(
        live_server.url + PATH,
        json={
            "model": MODEL,
            "token_ids": prompt,
            "sampling_params": params,
            "cache_salt": "1",
            "priority": 0,
        },
        headers={"x-session-id": "a"},
    )
    assert response.headers["x-ignored-fields"] == "sampling_params.routed_experts_prompt_start"
    answer = response.json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] in eos
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token_id}"
        assert entry["token_id"] == token_id
        assert math.isfinite(entry["logprob"])
        assert -9999 < entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["token_id"] == token_id
    assert answer["request_id"]
    count = len(choice["token_ids"])
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": count}]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(live_server: ServerProcess, n: int) -> None:
    body: dict[str, Any] = {
        "token_ids": ids_of(live_server, "one two three"),
        "sampling_params": {"n": n, "max_tokens": 9, "logprobs": 2, "seed": 5, "ignore_eos": True},
        "return_token_ids": True,
    }
    whole = post(live_server, **body)
    *chunks, last = stream(live_server, **body, stream_options={"include_usage": True})
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == body["token_ids"]
    assert "prompt_token_ids" not in chunks[1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 9 * n
    for choice in whole["choices"]:
        pieces = [
            piece
            for chunk in chunks
            for piece in chunk["choices"]
            if piece["index"] == choice["index"]
        ]
        made = [token_id for piece in pieces for token_id in piece["token_ids"]]
        content = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
        assert made == choice["token_ids"]
        for piece, entry in zip(content, choice["logprobs"]["content"], strict=True):
            assert piece["token_id"] == entry["token_id"]
            assert piece["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert pieces[-1]["weight_versions"] == choice["weight_versions"]


def test_without_a_limit_it_is_not_the_sixteen_tokens_of_others(live_server: ServerProcess) -> None:
    params = {"min_tokens": 20, "seed": 1, "stop": list(" 0123456789abcdefghijklmnopqrstuvwxyz")}
    answer = post(live_server, token_ids=ids_of(live_server, "hello"), sampling_params=params)
    assert len(answer["choices"][0]["token_ids"]) >= 20


def test_scoring_and_the_text_mode(live_server: ServerProcess) -> None:
    """Send what prime-rl's scorer sends, and fields of the text mode."""
    prompt = ids_of(live_server, "What is 17 + 25?")
    params = {"prompt_logprobs": 1, "max_tokens": 1, "logprobs": 0, "temperature": 0}
    params |= {"skip_special_tokens": False, "ignore_eos": True}
    answer = post(live_server, token_ids=prompt, sampling_params=params, output_mode="text")
    first, *entries = answer["prompt_logprobs"]
    assert first is None
    assert [str(token_id) in entry for token_id, entry in zip(prompt[1:], entries, strict=True)]
    (choice,) = answer["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert choice["text"] == entry["token"]
    assert bytes(entry["bytes"]).decode() == entry["token"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 10**9}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_bad_body_names_its_field(
    live_server: ServerProcess, change: dict[str, Any], param: str
) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}} | change
    response = httpx2.post(live_server.url + PATH, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_an_aborted_request_returns_what_it_has(live_server: ServerProcess) -> None:
    body = {
        "token_ids": [1, 2, 3],
        "request_id": "run-7",
        "sampling_params": {"ignore_eos": True, "logprobs": 0, "max_tokens": 1500},
        "stream": True,
    }
    seen: list[dict[str, Any]] = []
    with httpx2.stream("POST", live_server.url + PATH, json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            seen += json.loads(line.removeprefix("data: "))["choices"]
            if len(seen) == 3:
                httpx2.post(
                    f"{live_server.url}/inference/v1/abort_requests",
                    json={"request_ids": ["run-7"]},
                )
    assert seen[-1]["finish_reason"] == "abort"
    made = sum(len(part["token_ids"]) for part in seen)
    assert sum(len(part["logprobs"]["content"]) for part in seen) == made
    assert seen[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": made}]
