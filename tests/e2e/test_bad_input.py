"""Bad input gets a clear 4xx naming the field, and the next good request is right."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BOTH_ENDS = {"add_generation_prompt": True, "continue_final_message": True}
DEEP: Any = "x"
for _ in range(50):
    DEEP = [DEEP]

# Each row has a path, a body, and the field that the error names.
BODIES: list[tuple[str, Any, str | None]] = [
    (CHAT, {}, "messages"),
    (CHAT, [], None),
    (CHAT, "text", None),
    (CHAT, None, None),
    (CHAT, {"model": MODEL}, "messages"),
    (CHAT, {"model": 7, "messages": HI}, "model"),
    (CHAT, {"model": "other", "messages": HI}, "model"),
    (CHAT, {"model": "", "messages": HI}, "model"),
    (CHAT, {"model": MODEL, "messages": []}, "messages"),
    (CHAT, {"model": MODEL, "messages": "hi"}, "messages"),
    (CHAT, {"model": MODEL, "messages": [7]}, "messages"),
    (CHAT, {"model": MODEL, "messages": [{}]}, "messages"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"model": MODEL, "messages": [{"role": "king", "content": "hi"}]}, "messages"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": 7}]}, "messages"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": DEEP}]}, "messages"),
    (
        CHAT,
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    (
        CHAT,
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages",
    ),
    *(
        (CHAT, {"model": MODEL, "messages": HI, name: value}, name)
        for name, value in [
            ("temperature", "hot"),
            ("temperature", -0.1),
            ("temperature", 2.1),
            ("temperature", True),
            ("temperature", [1]),
            ("top_p", 0),
            ("top_p", 1.5),
            ("top_k", -2),
            ("top_k", 1.5),
            ("min_p", -1),
            ("n", 0),
            ("n", 129),
            ("n", "2"),
            ("n", True),
            ("seed", "x"),
            ("seed", 2**64),
            ("stop", 7),
            ("stop", [""]),
            ("stop", ["a"] * 65),
            ("stop_token_ids", [10**9]),
            ("stop_token_ids", ["a"]),
            ("max_tokens", -1),
            ("max_tokens", 10**9),
            ("max_tokens", "many"),
            ("max_completion_tokens", 1.5),
            ("min_tokens", -1),
            ("logit_bias", {"a": 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"999999": 1}),
            ("logit_bias", {"9" * 5000: 1}),
            ("logit_bias", {"1": 101}),
            ("logit_bias", [1]),
            ("top_logprobs", 3),
            ("top_logprobs", -1),
            ("logprobs", 3),
            ("presence_penalty", 3),
            ("frequency_penalty", -3),
            ("repetition_penalty", 0),
            ("allowed_token_ids", []),
            ("allowed_token_ids", [-5]),
            ("prompt_logprobs", -1),
            ("prompt_logprobs", 21),
            ("stream", "yes"),
            ("stream_options", 7),
            ("priority", "high"),
            ("request_id", "x" * 200),
            ("tool_choice", "required"),
            ("chat_template", "{{ messages }}"),
            ("chat_template_kwargs", 7),
            ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
            ("chat_template_kwargs", {"tokenize": True}),
            ("modalities", ["audio"]),
            ("modalities", 7),
            ("modalities", [7]),
            ("reasoning_effort", 3),
            ("enable_thinking", "yes"),
            ("echo", 1),
            ("response_format", 7),
            ("response_format", {"type": 5}),
            ("request_id", ""),
            ("response_format", {"type": "json_schema"}),
            ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}),
            ("structured_outputs", {"regex": "a("}),
            ("structured_outputs", {"regex": "a", "choice": ["b"]}),
            ("structured_outputs", {"regex": 7}),
            ("structured_outputs", {"choice": []}),
            ("structured_outputs", {"choice": ["a", 5]}),
            ("structured_outputs", {"grammar": "no grammar"}),
            ("structured_outputs", {"json": {"type": "nothing"}}),
            ("structured_outputs", {"structural_tag": {"format": {"type": "none"}}}),
            ("guided_json", {"$ref": "#/$defs/missing"}),
            ("guided_regex", "("),
            ("json_schema", "no json"),
            ("stream_options", {"include_usage": "yes"}),
        ]
    ),
    # JSON can write half a surrogate pair; nothing after it can.
    *(
        (CHAT, {"model": MODEL, "messages": HI} | part, None)
        for part in [
            {"model": "\ud800"},
            {"messages": [{"role": "user", "content": "a\udfff"}]},
            {"messages": [{"role": "user", "name": "\udc00", "content": "a"}]},
            {"stop": "\ud800"},
            {"logit_bias": {"\ud800": 1}},
            {"chat_template_kwargs": {"x": "\ud800"}},
            {"\ud800": 1},
        ]
    ),
    (TEXT, {"model": MODEL, "prompt": "\ud83d"}, None),
    ("/tokenize", {"prompt": "\ude00"}, None),
    *(
        (
            CHAT,
            {"model": MODEL, "messages": [*HI, {"role": "assistant", "tool_calls": calls}]},
            None,
        )
        for calls in (5, [5], "x", [{"function": 5}], [{"function": {"name": None}}])
    ),
    (CHAT, {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"model": MODEL, "messages": HI, "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    *(
        (path, body | {"stream_options": {"include_usage": True}}, "stream_options")
        for path, body in (
            (CHAT, {"messages": HI}),
            (TEXT, {"prompt": "a"}),
            ("/v1/responses", {"input": "a"}),
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
        )
    ),
    *(
        (path, body | BOTH_ENDS, "continue_final_message")
        for path, body in (
            (CHAT, {"messages": HI}),
            ("/v1/chat/completions/render", {"messages": HI}),
            ("/tokenize", {"messages": HI}),
        )
    ),
    (TEXT, {"model": MODEL}, "prompt"),
    *(
        (TEXT, {"model": MODEL, "prompt": prompt}, "prompt")
        for prompt in ("", [], [""], [[]], [["a"]], [1.5], [-1], [10**9], [[3], "a"], {"a": 1}, 7)
    ),
    # The number exceeds the queue's default limit.
    (TEXT, {"model": MODEL, "prompt": ["a"] * 17, "n": 128}, "prompt"),
    (TEXT, {"model": MODEL, "prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"model": MODEL, "prompt": "a", "best_of": 3}, "best_of"),
    (TEXT, {"model": MODEL, "prompt": "a", "image_data": ["data:,"]}, "image_data"),
    *(
        (TEXT, {"model": MODEL, "prompt": "a", name: value}, name)
        for name, value in [
            ("logprobs", "2"),
            ("logprobs", 1.5),
            ("logprobs", -2),
            ("logprobs", 50),
            # Each value is more than --max-logprobs allows.
            ("logprobs", -1),
            ("prompt_logprobs", -1),
            ("prompt_logprobs", True),
            ("logprobs_mode", "raw_logits"),
            ("logprob_token_ids", [10**9]),
            ("logprob_token_ids", [1] * 1025),
            ("return_weight_versions", 1),
            ("bad_words", ["x"]),
            ("truncate_prompt_tokens", 0),
            ("use_beam_search", "soon"),
        ]
    ),
    (TEXT, {"model": MODEL, "prompt": "a", "echo": "yes"}, "echo"),
    ("/tokenize", {"prompt": 7}, "prompt"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/tokenize", {"messages": []}, "messages"),
    (
        "/tokenize",
        {"messages": HI, "chat_template_kwargs": {"tokenize": 1}},
        "chat_template_kwargs",
    ),
]


def check_error(response: httpx2.Response, param: str | None) -> None:
    assert 400 <= response.status_code < 500, response.text
    assert response.status_code != 422
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 2000
    assert response.headers["x-request-id"]
    if param is not None:
        assert error["param"] == param


def check_good(server: ServerProcess) -> None:
    body = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 12}
    response = httpx2.post(server.url + CHAT, json=body)
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"]


def send(url: str, body: Any) -> httpx2.Response:
    """Send a body as JSON in ASCII, which can write what UTF-8 cannot."""
    headers = {"content-type": "application/json"}
    return httpx2.post(url, content=json.dumps(body).encode(), headers=headers)


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
def test_a_bad_body_is_refused_by_name(
    live_server: ServerProcess, path: str, body: Any, param: str | None
) -> None:
    check_error(send(live_server.url + path, body), param)


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", {"content-type": "application/json"}),
        (b"{", {"content-type": "application/json"}),
        (b"\xff\xfe", {"content-type": "application/json"}),
        (b"null", {"content-type": "application/json"}),
        (b'{"model": NaN}', {"content-type": "application/json"}),
        (b"[" * 100_000, {"content-type": "application/json"}),
        (b"model=a", {"content-type": "application/x-www-form-urlencoded"}),
        (b'{"model": "m"}', {"content-type": "text/plain"}),
        (b"x" * (9 * 1024 * 1024), {"content-type": "application/json"}),
    ],
    ids=["empty", "cut", "not-utf8", "null", "nan", "deep", "form", "text", "large"],
)
def test_a_broken_body_is_refused(
    live_server: ServerProcess, content: bytes, headers: dict[str, str]
) -> None:
    response = httpx2.post(live_server.url + CHAT, content=content, headers=headers)
    check_error(response, None)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", CHAT),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/nothing"),
        ("GET", "/v1/models/org/none"),
        ("POST", "/v1/assistants"),
        ("PUT", "/health"),
    ],
)
def test_a_wrong_route_or_method_is_refused(
    live_server: ServerProcess, method: str, path: str
) -> None:
    check_error(httpx2.request(method, live_server.url + path), None)


def test_a_whole_pair_of_surrogates_is_one_character(live_server: ServerProcess) -> None:
    raw = b'{"prompt": "\\ud83d\\ude00"}'
    headers = {"content-type": "application/json"}
    response = httpx2.post(f"{live_server.url}/tokenize", content=raw, headers=headers)
    assert response.status_code == 200
    body = {"tokens": response.json()["tokens"]}
    assert httpx2.post(f"{live_server.url}/detokenize", json=body).json()["prompt"] == "\U0001f600"


def test_a_good_request_is_right_afterwards(live_server: ServerProcess) -> None:
    check_good(live_server)
    assert live_server.metric("vllm:num_requests_running") == 0
    assert live_server.metric("vllm:kv_cache_usage_perc") == 0
