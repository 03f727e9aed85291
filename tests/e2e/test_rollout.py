"""Rollouts, over a scripted engine and against the embedded model."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import StepError
from mlx_parallm.types.events import ErrorEvent, GenerateEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, fail, hang, leave, serve_fake, write
from tests.server_process import ServerProcess

PATH = "/v1/rl/rollout"
CHAT = [{"role": "user", "content": "What is 17 + 25?"}]


def post(url: str, status: int = 200, **body: Any) -> Any:
    response = httpx2.post(url + PATH, json=body)
    assert response.status_code == status, response.text
    return response.json()


def events(url: str, **body: Any) -> list[dict[str, Any]]:
    response = httpx2.post(url + PATH, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    parsed = []
    for part in response.text.split("\n\n"):
        name, _, data = part.partition("\n")
        if name.startswith("event: "):
            parsed.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {parsed[-1]['type']}"
    return parsed


class Scorer(BaseHTTPRequestHandler):
    """A verifier that likes long prompts, breaks on one sample and redirects on another."""

    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        sample = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(sample)
        status = (sample["metadata"] or {}).get("status", 200)
        answer = json.dumps({"reward": len(sample["prompt_token_ids"])}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.send_header("location", "/elsewhere")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def scorer() -> Iterator[str]:
    Scorer.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/score"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def served(scorer: str) -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    config = ServerConfig(verifier_urls=("http://127.0.0.1:9/", scorer))
    with serve_fake(engine, config, max_waiting=64) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    served[0].script = write("hello")
    return served[0]


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


def test_a_verifier_rewards_every_sample(engine: FakeEngine, url: str, scorer: str) -> None:
    answer = post(url, prompts=["ab", "abcd"], n=2, verifier={"url": scorer})
    rewards = [[sample["reward"] for sample in group["samples"]] for group in answer["groups"]]
    assert rewards == [[2, 2], [4, 4]]
    sample = next(seen for seen in Scorer.seen if seen["prompt_index"] == 1 and seen["index"] == 1)
    assert sample["id"] == answer["id"]
    assert sample["text"] == "hello"
    assert sample["token_ids"] == answer["groups"][1]["samples"][1]["token_ids"]


def test_a_verifiers_failure_is_told_in_its_sample(
    engine: FakeEngine, url: str, scorer: str
) -> None:
    prompts = [{"text": "a", "metadata": {"status": status}} for status in (200, 500, 307)]
    answer = post(url, prompts=prompts, verifier={"url": scorer})
    samples = [group["samples"][0] for group in answer["groups"]]
    assert [sample["reward"] for sample in samples] == [1, None, None]
    assert [sample["verifier_error"] for sample in samples] == [
        None,
        "The verifier answered 500.",
        "The verifier answered 307.",
    ]
    assert answer["groups"][1]["metadata"] == {"status": 500}
    (nobody,) = post(url, prompts=["a"], verifier={"url": "http://127.0.0.1:9/"})["groups"]
    assert "cannot be asked" in nobody["samples"][0]["verifier_error"]


def test_only_allowed_urls_are_asked(engine: FakeEngine, url: str, scorer: str) -> None:
    answer = post(url, 400, prompts=["a"], verifier={"url": f"{scorer}?x=1"})
    assert answer["error"]["param"] == "verifier"


def test_one_group_that_fails_does_not_lose_the_others(engine: FakeEngine, url: str) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        steps = write("hi") if request.prompt_ids != (98,) else fail(StepError("no"), after="h")
        async for event in steps(request):
            yield event

    engine.script = script
    first, second = post(url, prompts=["a", "b"])["groups"]
    assert (first["error"], len(first["samples"])) == (None, 1)
    assert (second["error"]["message"], second["samples"]) == ("no", [])
    kinds = {
        (event["type"], event.get("prompt_index")) for event in events(url, prompts=["a", "b"])
    }
    assert kinds == {("sample", 0), ("error", 1), ("usage", None)}
    assert post(url, 500, prompts=["b"])["error"]["message"] == "no"


def test_a_bug_ends_the_stream_with_an_error(engine: FakeEngine, url: str) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield ErrorEvent(request_id=request.request_id, error=StepError("first"))
        raise AssertionError("a bug")

    engine.script = script
    assert events(url, prompts=["a"])[-1]["error"]["message"].startswith("The server failed")


def test_after_its_time_a_rollout_is_told_to_end(engine: FakeEngine, url: str) -> None:
    engine.script = hang(after="he")
    engine.cancelled.clear()
    while not engine.aborted.empty():
        engine.aborted.get()

    def wait() -> None:
        while len(engine.cancelled) < 2:
            time.sleep(0.01)

    leave(url, PATH, {"prompts": ["a", "b"], "timeout_s": 0.05}, wait)
    assert len(engine.cancelled) == 2
    # The client left, so both requests are aborted, perhaps after those of another test.
    left = set(engine.cancelled)
    while left:
        left.discard(engine.aborted.get())


def test_the_queue_bounds_prompts_times_n(engine: FakeEngine, url: str) -> None:
    assert post(url, 400, prompts=["a"] * 33, n=2)["error"]["param"] in ("n", "prompts")
    engine.is_full = True
    try:
        response = httpx2.post(url + PATH, json={"prompts": ["a"]})
    finally:
        engine.is_full = False
    assert response.status_code == 429


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": [""]}, "prompts"),
        ({"prompts": [[]]}, "prompts"),
        ({"prompts": [[10**6]]}, "prompts"),
        ({"prompts": [{"text": "a", "messages": CHAT}]}, "prompts"),
        ({"prompts": [{"token_ids": [10**6], "append_text": "a"}]}, "prompts"),
        ({"prompts": [[{"role": "nobody", "content": "x"}]]}, "prompts"),
        ({"prompts": [{"text": "a", "unknown": 1}]}, "prompts"),
        ({"seeds": [1, 2]}, "seeds"),
        ({"seeds": [2**63]}, "seeds"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 10**6}, "top_logprobs"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"logprobs_mode": "raw"}, "logprobs_mode"),
        ({"stop": [""]}, "stop"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"verifier": {"url": "http://elsewhere/"}}, "verifier"),
    ],
)
def test_a_bad_body_names_its_field(
    live_server: ServerProcess, change: dict[str, Any], param: str
) -> None:
    assert post(live_server.url, 400, **({"prompts": ["a"]} | change))["error"]["param"] == param


@pytest.mark.parametrize(("field", "name"), [("model", "none"), ("adapter", "policy")])
def test_an_unknown_model_or_adapter(engine: FakeEngine, url: str, field: str, name: str) -> None:
    assert post(url, 404, prompts=["a"], **{field: name})["error"]["param"] == field


def test_what_a_trainer_gets(live_server: ServerProcess) -> None:
    body: dict[str, Any] = {
        "prompts": ["one two", CHAT, [264, 75, 419], {"text": "x", "metadata": {"id": 4}}],
        "n": 3,
        "max_tokens": 12,
        "seed": 1,
        "top_logprobs": 2,
        "prompt_logprobs": 1,
        "entropy": True,
        "top_k": 20,
        "temperature": 1.2,
        "logprobs_mode": "processed_logprobs",
    }
    answer = post(live_server.url, **body)
    assert answer["logprobs_mode"] == "processed_logprobs"
    assert answer["groups"][2]["prompt_token_ids"] == [264, 75, 419]
    assert answer["groups"][3]["metadata"] == {"id": 4}
    for group in answer["groups"]:
        assert [sample["index"] for sample in group["samples"]] == [0, 1, 2]
        first, *scores = group["prompt_logprobs"]
        assert first is None
        assert all(math.isfinite(score) and score <= 0 for score in scores)
        assert len(group["prompt_top_logprobs"]) == len(group["prompt_token_ids"])
        for sample in group["samples"]:
            count = len(sample["token_ids"])
            assert count == len(sample["logprobs"]) == len(sample["entropy"])
            assert all(-9999 < logprob <= 1e-5 for logprob in sample["logprobs"])
            assert all(len(logprob) <= 2 for logprob in sample["top_logprobs"])
            assert all(entropy >= -1e-5 for entropy in sample["entropy"])
            spans = [{"version": "default", "start": 0, "end": count}]
            assert sample["weight_versions"] == spans
    made = sum(
        len(sample["token_ids"]) for group in answer["groups"] for sample in group["samples"]
    )
    assert answer["usage"]["completion_tokens"] == made
    again = {
        (event["prompt_index"], event["index"]): event["token_ids"]
        for event in events(live_server.url, **body)
        if event["type"] == "sample"
    }
    assert again == {
        (group["index"], sample["index"]): sample["token_ids"]
        for group in answer["groups"]
        for sample in group["samples"]
    }


# The prompt is shorter than a block, so no engine is preferred for its continuation.
@pytest.mark.one_engine
def test_a_conversation_goes_on_from_its_exact_tokens(live_server: ServerProcess) -> None:
    """Two turns by token ids give the prompt that the template writes, whatever was sampled."""
    kwargs = {"enable_thinking": False}
    common: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "chat_template_kwargs": kwargs}
    (first,) = post(live_server.url, prompts=[CHAT], **common)["groups"]
    (sample,) = first["samples"]
    assert sample["finish_reason"] == "stop"
    so_far = first["prompt_token_ids"] + sample["token_ids"]
    more = [{"role": "user", "content": "Sort these numbers: 9 4 7 1"}]
    item = {"token_ids": so_far, "append_messages": more}
    (second,) = post(live_server.url, prompts=[item], **common)["groups"]
    prompt = second["prompt_token_ids"]
    assert prompt[: len(so_far)] == so_far
    text = httpx2.post(
        f"{live_server.url}/detokenize", json={"tokens": prompt[len(so_far) :]}
    ).json()["prompt"]
    assert text == (
        "\n<|im_start|>user\nSort these numbers: 9 4 7 1<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert second["cached_tokens"] > 0
    text_item = {"token_ids": so_far, "append_text": "\n"}
    (third,) = post(live_server.url, prompts=[text_item], **common)["groups"]
    assert len(third["prompt_token_ids"]) == len(so_far) + 1


def test_an_abort_returns_partial_samples(live_server: ServerProcess) -> None:
    body = {"prompts": ["a", "b"], "n": 2, "ignore_eos": True, "timeout_s": 0.3, "seed": 1}
    answer = post(live_server.url, **body)
    samples = [sample for group in answer["groups"] for sample in group["samples"]]
    assert [sample["finish_reason"] for sample in samples] == ["abort"] * 4
    assert all(len(sample["token_ids"]) == len(sample["logprobs"]) for sample in samples)
    assert httpx2.get(f"{live_server.url}/load").json()["server_load"] == 0


def test_a_rollout_is_aborted_by_its_id(live_server: ServerProcess) -> None:
    body = {"prompts": ["a"] * 2, "ignore_eos": True, "request_id": "r1", "stream": True, "n": 2}
    body |= {"stop": ["q"], "max_tokens": 1500}

    def abort() -> None:
        while not httpx2.get(f"{live_server.url}/load").json()["num_running"]:
            pass
        answer = httpx2.post(f"{live_server.url}/abort_request", json={"rid": "r1"})
        assert answer.json() == {"aborted": ["rollout-r1"]}

    thread = threading.Thread(target=abort)
    thread.start()
    streamed = events(live_server.url, **body)
    thread.join()
    assert [event["type"] for event in streamed] == ["sample"] * 4 + ["usage"]
    assert "abort" in {event.get("finish_reason") for event in streamed}
