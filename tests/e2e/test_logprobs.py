"""Log-probabilities and token ids of the embedded model, as a trainer reads them over HTTP."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {"model": MODEL, "return_token_ids": True, "logprobs": 0}
# The tolerance is that of float32 in docs/logprobs.md.
TOLERANCE = 1e-4


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    response = httpx2.post(server.url + path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def pieces(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    response = httpx2.post(server.url + path, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def encode(server: ServerProcess, text: str) -> list[int]:
    return post(server, "/tokenize", model=MODEL, prompt=text)["tokens"]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_sampled_tokens_have_the_numbers_of_the_same_tokens_as_a_prompt(
    live_server: ServerProcess, mode: str
) -> None:
    # All together are more than a step takes; the second prompt begins as the first, and finds it
    # cached.
    long = encode(live_server, "What is 12 + 30? " * 80)[:400]
    sampled = ASKED | {"temperature": 1.0, "logprobs_mode": mode, "max_tokens": 24}
    choices = [
        choice
        for prompt in (long, [*long, *long[:7]])
        for choice in post(live_server, TEXT, prompt=prompt, n=3, seed=5, **sampled)["choices"]
    ]
    texts = [choice["prompt_token_ids"] + choice["token_ids"] for choice in choices]
    assert {len(text) for text in texts} != {len(texts[0])}
    fields = {"model": MODEL, "prompt": texts, "max_tokens": 1, "prompt_logprobs": 0}
    scored = post(live_server, TEXT, **fields)["choices"]
    for choice, text, prompt_choice in zip(choices, texts, scored, strict=True):
        begin = len(choice["prompt_token_ids"])
        ids, entries = text[begin:], prompt_choice["prompt_logprobs"][begin:]
        values = [entry[str(i)]["logprob"] for i, entry in zip(ids, entries, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(values, abs=TOLERANCE)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("end", ["eos", "stop token", "stop string", "length"])
def test_the_token_that_ended_a_sample_is_told_with_its_logprob(
    live_server: ServerProcess, path: str, end: str
) -> None:
    said = [{"role": "user", "content": "What is 2 + 3?"}]
    prompt = {"messages": said} if path == CHAT else {"prompt": "1, 2, 3,"}
    body = ASKED | prompt | {"temperature": 0, "max_tokens": 60, "logprobs": path == CHAT or 0}
    (free,) = post(live_server, path, **body)["choices"]
    ids = free["token_ids"]
    shown = post(live_server, "/detokenize", tokens=ids)["prompt"]
    ends: dict[str, tuple[dict[str, Any], str]] = {
        "eos": ({}, free["finish_reason"]),
        "stop token": ({"stop_token_ids": [ids[3]]}, "stop"),
        "stop string": ({"stop": shown[2:5]}, "stop"),
        "length": ({"max_tokens": 3}, "length"),
    }  # fmt: skip
    more, reason = ends[end]
    (whole,) = post(live_server, path, **body | more)["choices"]
    parts = pieces(live_server, path, **body | more)
    streamed = [i for part in parts for i in part.get("token_ids", ())]
    assert whole["token_ids"] == streamed == ids[: len(streamed)]
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == reason
    if end == "stop token":
        assert streamed[-1] == ids[3]
        assert whole["stop_reason"] == ids[3]
    if end == "stop string":
        assert len(streamed) < len(ids)
        assert whole["stop_reason"] == more["stop"]
    key = "content" if path == CHAT else "token_logprobs"
    counts = [
        len(whole["logprobs"][key]),
        sum(len(part["logprobs"][key]) for part in parts if part.get("logprobs")),
    ]
    assert counts == [len(streamed)] * 2


def test_an_aborted_sample_has_a_logprob_for_each_of_its_tokens(live_server: ServerProcess) -> None:
    body = ASKED | {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    body |= {"request_id": "rl-abort", "return_weight_versions": True}
    ids: list[int] = []
    values: list[float] = []
    last: dict[str, Any] = {}
    with httpx2.stream("POST", live_server.url + TEXT, json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            if not ids:
                abort = httpx2.post(
                    f"{live_server.url}/abort_requests", json={"request_ids": ["rl-abort"]}
                )
                assert abort.json()["aborted"]
            last = json.loads(line.removeprefix("data: "))["choices"][0]
            ids += last["token_ids"]
            values += last["logprobs"]["token_logprobs"]
    assert last["finish_reason"] == "abort"
    assert 0 < len(ids) == len(values) < 1500
    spans = last["weight_versions"]
    assert [(span["start"], span["end"]) for span in spans] == [(0, len(ids))]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_tokens_that_were_forced_have_finite_numbers(
    live_server: ServerProcess, mode: str, temperature: float
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["zq", "xj"]}}, "required": ["a"]}
    forcing: list[dict[str, Any]] = [
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"choice": ["qqqq"]}},
        {"allowed_token_ids": [9], "ignore_eos": True},
        {"logit_bias": {str(i): -100 for i in range(400)}, "top_k": 3, "min_tokens": 4},
    ]
    for more in forcing:
        body = ASKED | {"prompt": "Once", "temperature": temperature, "seed": 1, "max_tokens": 12}
        body |= {"logprobs_mode": mode, "logprobs": 5} | more
        logprobs = post(live_server, TEXT, **body)["choices"][0]["logprobs"]
        values = logprobs["token_logprobs"]
        assert values
        assert all(math.isfinite(value) and value <= 0 for value in values)
        assert all(
            math.isfinite(value) for top in logprobs["top_logprobs"] for value in top.values()
        )
        if mode == "processed_logprobs" and "allowed_token_ids" in more:
            assert values == [0.0] * 12
        if mode == "raw_logprobs" and "allowed_token_ids" in more:
            assert max(values) < 0


def test_every_token_id_of_the_vocabulary_passes_as_it_is(live_server: ServerProcess) -> None:
    info = httpx2.get(f"{live_server.url}/server_info").json()["models"][0]
    size = info["vocab_size"]
    parts = [list(range(first, min(first + 1000, size))) for first in range(0, size, 1000)]
    body = ASKED | {"prompt": parts, "max_tokens": 1}
    choices = post(live_server, TEXT, **body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == parts
    for ids in ([size], [0, -1], [2**40]):
        refused = httpx2.post(live_server.url + TEXT, json=body | {"prompt": ids})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"


def test_a_salt_keeps_cached_prefixes_apart(live_server: ServerProcess) -> None:
    prompt = encode(live_server, "A text that nobody else has sent so far, of some length. " * 3)

    def cached(salt: str | None) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        return post(live_server, TEXT, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) > 0 for salt in ("1", "2", None, "1", "2", None)] == [False] * 3 + [
        True
    ] * 3
