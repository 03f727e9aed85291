"""The shapes of answers and streams, over a scripted engine and with the real SDK."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mlx_parallm.types.events import GenerateEvent, PromptEvent
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import TokenLogprob
from tests.fake_engine import FakeEngine, serve_fake, token_event, write

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT_TOKENS = len("user: hi\n")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serve_fake(engine) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    served[0].reset()
    return served[0]


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        yield client


def unoffered() -> list[str]:
    """Return the paths that the documentation lists as not offered."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    section = text.partition("### Routes that are not offered\n")[2].partition("\n#")[0]
    return re.findall(r"`(/v1/\S+)`", section)


def test_what_is_not_offered_is_a_404(url: str) -> None:
    paths = unoffered()
    assert len(paths) >= 12
    for path in paths:
        for answer in (httpx2.post(url + path, json={"model": "alias"}), httpx2.get(url + path)):
            assert answer.status_code == 404, path
            error = answer.json()["error"]
            assert error.keys() >= {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"


def post(url: str, path: str, **body: Any) -> Any:
    response = httpx2.post(url + path, json={"model": "alias"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    body = {"model": "alias", "stream": True} | body
    response = httpx2.post(url + path, json=body)
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_chat_answer_has_every_required_key(engine: FakeEngine, url: str) -> None:
    answer = post(url, CHAT, messages=HI)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "alias"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            # The id of the end token.
            "matched_stop": 256,
            "token_ids": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 6,
        "total_tokens": PROMPT_TOKENS + 6,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_stream_opens_and_ends_every_choice(engine: FakeEngine, url: str, n: int) -> None:
    chunks = stream(url, CHAT, messages=HI, n=n, stream_options={"include_usage": True})
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    *body, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6 * n
    for index in range(n):
        mine = [c["choices"][0] for c in body if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(choice["delta"]["content"] for choice in mine[1:-1])
        assert "".join(choice["delta"]["content"] for choice in mine[1:-1]) == "hello"
        assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, "stop")
        assert all(choice["finish_reason"] is None for choice in mine[:-1])


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "a"})])
def test_usage_is_null_before_the_last_chunk(
    engine: FakeEngine, url: str, path: str, prompt: dict[str, Any]
) -> None:
    body = prompt | {"stream_options": {"include_usage": True}, "prompt_logprobs": 0}
    *chunks, last = stream(url, path, **body)
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


def test_usage_comes_only_when_asked_for(engine: FakeEngine, url: str) -> None:
    assert not any("usage" in chunk for chunk in stream(url, CHAT, messages=HI))
    options = {"include_usage": None, "continuous_usage_stats": True}
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in stream(url, CHAT, messages=HI, stream_options=options)
    ]
    assert counts == [0, 1, 2, 3, 4, 5, 6]


def test_usage_that_is_turned_off_is_in_no_chunk(engine: FakeEngine, url: str) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    for path, prompt in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
        chunks = stream(url, path, **prompt, stream_options=options)
        assert not any("usage" in chunk for chunk in chunks)


def test_reasoning_is_split_and_counted_alike_whole_and_streamed(
    engine: FakeEngine, url: str
) -> None:
    engine.script = write("<think>\nso\n</think>\n\nyes")
    whole = post(url, CHAT, messages=HI)
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("so", "so")
    assert message["content"] == "yes"
    *chunks, usage = stream(url, CHAT, messages=HI, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "so"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 2


def test_chat_logprobs_come_with_their_bytes(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.script = write("hé")
    answer = client.chat.completions.create(
        model="alias",
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=1,
        max_tokens=1,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    (entry,) = logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("h", -0.5, [104])
    assert entry.top_logprobs[0].token == "h"
    assert answer.choices[0].finish_reason == "length"


def test_echo_begins_with_the_assistants_last_message(engine: FakeEngine, url: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "echo": True, "continue_final_message": True}
    assert post(url, CHAT, **body)["choices"][0]["message"]["content"] == "Well, hello"
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(url, CHAT, **body)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well, hello"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_choices_are_prompt_major_for_every_form(
    engine: FakeEngine, url: str, prompt: Any, prompts: list[str]
) -> None:
    answer = post(url, TEXT, prompt=prompt, n=2, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [text + "hello" for text in prompts for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 6 * 2 * len(prompts)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(
    engine: FakeEngine, client: openai.OpenAI, max_tokens: int
) -> None:
    answer = client.completions.create(
        model="alias", prompt="abc", echo=True, logprobs=1, max_tokens=max_tokens
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c", "h"][: 3 + max_tokens]
    assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.5][: 3 + max_tokens]
    assert logprobs.text_offset == list(range(3 + max_tokens))
    assert answer.choices[0].text == "abch"[: 3 + max_tokens]
    assert answer.choices[0].finish_reason == "length"


def test_completion_streams_carry_the_prompts_part_once(engine: FakeEngine, url: str) -> None:
    chunks = stream(
        url, TEXT, prompt="ab", echo=True, return_token_ids=True, prompt_logprobs=1, logprobs=1
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "abhello"
    assert [choice.get("prompt_token_ids") for choice in choices] == [[97, 98], *[None] * 5]
    assert ["prompt_logprobs" in choice for choice in choices] == [True, *[False] * 5]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == list(range(8))
    assert choices[-1]["finish_reason"] == "stop"


def test_a_stream_of_no_tokens_is_the_echo_alone(engine: FakeEngine, url: str) -> None:
    (chunk,) = stream(url, TEXT, prompt="ab", echo=True, max_tokens=0)
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("ab", "length")


def test_prompt_logprobs_are_in_vllms_shape(engine: FakeEngine, url: str) -> None:
    entry = {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    expected = [None, {"98": entry}]
    answer = post(url, TEXT, prompt="ab", prompt_logprobs=1)
    assert answer["choices"][0]["prompt_logprobs"] == expected
    chunks = stream(url, CHAT, messages=HI, prompt_logprobs=1)
    scores = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert [len(prompt_scores) for prompt_scores in scores] == [PROMPT_TOKENS]


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(2, 0), (0, 2), (1, 2)])
def test_the_echo_and_prompt_logprobs_each_have_their_own_alternatives(
    engine: FakeEngine, url: str, logprobs: int, prompt_logprobs: int
) -> None:
    top = ((120, -0.125), (121, -0.5))

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        assert request.params.prompt_logprobs == 2
        entry = TokenLogprob(98, -4.0, top, 9)
        name = request.request_id
        yield PromptEvent(request_id=name, num_cached_tokens=0, prompt_logprobs=(None, entry))
        yield token_event(request, 0, (), is_last=True)

    engine.script = script
    fields = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    (choice,) = post(url, TEXT, prompt="ab", echo=True, max_tokens=0, **fields)["choices"]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["b", *"xy"[:logprobs]]
    assert list(choice["prompt_logprobs"][1]) == ["98", *["120", "121"][:prompt_logprobs]]


def test_parameters_reach_the_engine(engine: FakeEngine, url: str) -> None:
    post(
        url,
        CHAT,
        messages=HI,
        temperature=0.5,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=2,
        max_tokens=9,
        max_completion_tokens=7,
        stop="x",
        stop_token_ids=[4],
        ignore_eos=True,
        logit_bias={"5": -100},
        allowed_token_ids=[1, 2],
        seed=-(2**63),
        priority=-1,
        request_id="r",
        cache_salt="s",
    )
    request = engine.submitted.get()
    params = request.params
    assert (request.request_id, request.model) == ("chatcmpl-r", "org/fake")
    assert (request.priority, request.cache_salt, request.client) == (-1, "s", "")
    assert (params.temperature, params.top_k, params.min_p) == (0.5, 3, 0.1)
    assert (params.repetition_penalty, params.min_tokens, params.max_tokens) == (1.2, 2, 7)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x",), (4,), True)
    assert (params.logit_bias, params.allowed_token_ids) == (((5, -100.0),), (1, 2))
    assert params.seed == -(2**63)


def test_null_is_absent_everywhere(engine: FakeEngine, url: str) -> None:
    schema = httpx2.get(f"{url}/openapi.json").json()["components"]["schemas"]
    for path, name, body in [
        (CHAT, "ChatRequest", {"messages": HI}),
        (TEXT, "CompletionRequest", {"prompt": "a"}),
        ("/tokenize", "TokenizeRequest", {"prompt": "a"}),
    ]:
        nulls = dict.fromkeys(schema[name]["properties"])
        post(url, path, **(nulls | {"model": "alias"} | body))


def test_every_parameter_is_described_and_422_is_not_promised(url: str) -> None:
    schema = httpx2.get(f"{url}/openapi.json").json()
    bare = [
        f"{name}.{field}"
        for name, form in schema["components"]["schemas"].items()
        for field, properties in form.get("properties", {}).items()
        if "description" not in properties and "$ref" not in properties
    ]
    assert bare == []
    # The quotes exclude these digits within the numbers and digests of examples.
    assert '"422"' not in json.dumps(schema)


def test_models_are_listed_with_and_without_the_prefix(
    engine: FakeEngine, url: str, client: openai.OpenAI
) -> None:
    assert [model.id for model in client.models.list()] == ["org/fake", "alias"]
    card = httpx2.get(f"{url}/models/org/fake").json()
    assert card == client.models.retrieve("org/fake").to_dict()
    assert (card["max_model_len"], card["root"], card["parent"]) == (256, "/models/fake", None)


def test_tokens_go_there_and_back(engine: FakeEngine, url: str) -> None:
    there = post(url, "/tokenize", content="abc", return_token_strs=True)
    assert there == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [97, 98, 99],
        "token_strs": ["a", "b", "c"],
    }
    assert post(url, "/detokenize", tokens=there["tokens"]) == {"prompt": "abc"}
    assert post(url, "/tokenize", messages=HI)["count"] == PROMPT_TOKENS
