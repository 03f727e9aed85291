"""Refusals, failures and departures, over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types import errors
from mlx_parallm.types.events import ErrorEvent
from tests.fake_engine import FakeEngine, fail, hang, leave, serve_fake, write

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODIES = {CHAT: {"model": "alias", "messages": HI}, TEXT: {"model": "alias", "prompt": "hi"}}
# The limit is long enough for a loaded machine, and only a failing test waits for it.


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    config = ServerConfig(sse_keep_alive_s=0.05, max_body_bytes=100_000)
    with serve_fake(engine, config, max_waiting=6) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    engine = served[0]
    engine.reset()
    engine.is_dead = engine.is_full = False
    return engine


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


def post(url: str, path: str, *, headers: dict[str, str] | None = None, **extra: Any) -> Any:
    return httpx2.post(url + path, json=BODIES[path] | extra, headers=headers or {})


def events(text: str) -> list[Any]:
    """Return the data of a stream's events, without its comments."""
    lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.OverloadedError("full", retry_after_s=7), 429),
        (errors.ShuttingDownError("going"), 503),
        (errors.EngineDeadError("dead"), 503),
        (errors.ContextLengthError(10, "Too long."), 400),
        (errors.StepError("failed"), 500),
    ],
)
def test_a_refusal_is_a_plain_answer(
    engine: FakeEngine, url: str, path: str, stream: bool, error: errors.ParallmError, status: int
) -> None:
    engine.refusal = error
    response = post(url, path, stream=stream)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert response.headers.get("retry-after") == ("7" if status == 429 else None)
    assert response.headers.get("x-should-retry") == ("false" if status == 500 else None)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_full_queue_refuses_before_the_prompt_is_encoded(
    engine: FakeEngine, url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    model = GENERATION.client(engine).get_model("alias")
    monkeypatch.setattr(model.tokenizer, "encode", encoded.append)
    engine.is_full = True
    assert post(url, path).status_code == 429
    # Clients need not retry a request that can never fit.
    assert post(url, path, n=7).status_code == 400
    assert encoded == []
    assert engine.submitted.empty()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_error_before_the_first_token_is_a_plain_answer(
    engine: FakeEngine, url: str, path: str
) -> None:
    engine.script = fail(errors.StepError("no"))
    assert post(url, path, stream=True).status_code == 500
    assert post(url, path).status_code == 500


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_error_in_a_stream_is_an_event_before_its_end(
    engine: FakeEngine, url: str, path: str
) -> None:
    engine.script = fail(errors.StepError("no"), after="ab")
    response = post(url, path, stream=True)
    assert response.status_code == 200
    *_, error, done = events(response.text)
    assert (error["error"]["type"], done) == ("server_error", "[DONE]")
    assert post(url, path).status_code == 500


def test_the_sdk_raises_the_error_of_a_stream(engine: FakeEngine, url: str) -> None:
    engine.script = fail(errors.StepError("no"), after="ab")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        stream = client.chat.completions.create(model="alias", messages=HI, stream=True)  # type: ignore[call-overload]
        with pytest.raises(openai.APIError, match="no"):
            list(stream)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {}, "messages"),
        (TEXT, {}, "prompt"),
        (CHAT, {"max_completion_tokens": 5}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 5}, "max_tokens"),
    ],
)
def test_an_overflow_names_the_field_of_the_route(
    engine: FakeEngine, url: str, path: str, fields: dict[str, Any], param: str
) -> None:
    field = "max_tokens" if fields else "messages"
    engine.refusal = errors.ContextLengthError(10, "Too long.", param=field)
    error = post(url, path, **fields).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "maximum context length is 10 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [(CHAT, {"n": 7}, "n"), (TEXT, {"n": 7}, "n"), (TEXT, {"prompt": ["a"] * 4, "n": 2}, "prompt")],
)
def test_what_the_queue_can_never_hold_is_not_to_be_tried_again(
    engine: FakeEngine, url: str, path: str, fields: dict[str, Any], param: str
) -> None:
    response = post(url, path, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert engine.submitted.empty()
    assert post(url, path, n=6).status_code == 200


def test_a_bug_is_a_500_with_its_request_id(engine: FakeEngine, url: str) -> None:
    def broken(_request: Any) -> Any:
        raise ZeroDivisionError

    engine.script = broken
    response = post(url, CHAT, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["type"] == "server_error"


def trip(*, after: str) -> Any:
    """Yield some text, then raise as a bug would."""

    async def script(request: Any) -> Any:
        async for event in fail(errors.StepError("no"), after=after)(request):
            if isinstance(event, ErrorEvent):
                raise ZeroDivisionError
            yield event

    return script


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_bug_in_a_stream_is_an_event_before_its_end(
    engine: FakeEngine, url: str, prompt: Any
) -> None:
    engine.script = trip(after="ab")
    *parts, error, done = events(post(url, TEXT, prompt=prompt, stream=True).text)
    assert parts
    assert (error["error"]["type"], done) == ("server_error", "[DONE]")
    assert post(url, TEXT, prompt=prompt).status_code == 500


@pytest.mark.parametrize("after", ["", "ab"])
def test_silence_is_filled_with_comments(engine: FakeEngine, url: str, after: str) -> None:
    engine.script = hang(after=after)
    comments = 0
    with httpx2.stream("POST", url + CHAT, json=BODIES[CHAT] | {"stream": True}) as response:
        for line in response.iter_lines():
            comments += line == ": keep-alive"
            if comments == 3:
                break
    assert engine.aborted.get() == engine.submitted.get().request_id


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["", "ab"])
def test_a_client_that_leaves_ends_its_request(path: str, stream: bool, after: str) -> None:
    engine = FakeEngine()
    engine.script = hang(after=after)
    # Without keep-alive a stream waits for its first event, where it must see its client leave.
    with serve_fake(engine, ServerConfig(sse_keep_alive_s=0)) as url:
        leave(url, path, BODIES[path] | {"stream": stream}, engine.submitted.get)
        assert engine.aborted.get()


def test_leaving_ends_every_prompt_of_the_request(engine: FakeEngine, url: str) -> None:
    engine.script = hang(after="a")
    submitted: list[str] = []

    def wait() -> None:
        submitted.extend(engine.submitted.get().request_id for _ in range(3))

    leave(url, TEXT, {"model": "alias", "prompt": ["a", "b", "c"]}, wait)
    aborted = {engine.aborted.get() for _ in range(3)}
    assert aborted == set(submitted)


def test_a_refused_prompt_ends_those_admitted_before(engine: FakeEngine, url: str) -> None:
    def second_refused(request: Any) -> Any:
        if request.request_id.endswith("-1"):
            raise errors.OverloadedError("full")
        return write("a")(request)

    engine.script = second_refused
    response = post(url, TEXT, prompt=["a", "b"], request_id="r")
    assert response.status_code == 429
    assert engine.aborted.get() == "cmpl-r-0"


def test_a_large_body_without_a_length_is_refused(engine: FakeEngine, url: str) -> None:
    chunks = (b" " * 50_000 for _ in range(4))
    headers = {"content-type": "application/json"}
    response = httpx2.post(url + CHAT, content=chunks, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert response.headers["x-request-id"]


def test_one_client_id_serves_several_requests(engine: FakeEngine, url: str) -> None:
    headers = {"x-request-id": "trace-1"}
    answers = [post(url, CHAT, headers=headers) for _ in range(2)]
    assert {answer.headers["x-request-id"] for answer in answers} == {"trace-1"}
    ids = [answer.json()["id"] for answer in answers]
    assert ids[0] != ids[1]
    assert all(name.startswith("chatcmpl-trace-1-") for name in ids)


def test_health_says_whether_the_engine_lives(engine: FakeEngine, url: str) -> None:
    alive = httpx2.get(f"{url}/health")
    assert (alive.status_code, alive.content) == (200, b"")
    with httpx2.Client() as client:
        # On one connection, a client would take a body after a HEAD for the next answer.
        assert client.head(f"{url}/v1/models").status_code == 200
        assert client.head(f"{url}/health").status_code == 200
        engine.is_dead = True
        assert client.head(f"{url}/health").status_code == 503
        dead = client.get(f"{url}/health")
    assert dead.status_code == 503
    assert dead.json()["error"]["code"] == "engine_dead"
