"""`mlx_parallm serve` with the embedded model, called by the real client."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mlx_parallm.api.app import SLICES, STORING_SLICES, routes_of
from mlx_parallm.peers import child_process
from tests.server_process import ROOT, ServerProcess

MODEL = "mlx-parallm-demo"


@pytest.fixture
def client(live_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("org/other")
    assert refusal.value.code == "model_not_found"
    assert f"Served here: {MODEL}." in str(refusal.value)


def test_streamed_text_and_usage_equal_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=ask("What is 12 + 30?"), temperature=0, max_tokens=40
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=ask("What is 12 + 30?"),
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == (whole.choices[0].message.content or "")
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == (
        whole.choices[0].finish_reason
    )


def test_n_samples_of_a_seed_are_the_requests_of_the_seeds_that_follow(
    client: openai.OpenAI,
) -> None:
    options = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0}
    together = client.completions.create(**options, n=4, seed=7)
    alone = [client.completions.create(**options, seed=7 + i) for i in range(4)]
    assert [c.text for c in together.choices] == [answer.choices[0].text for answer in alone]


def test_a_batch_of_streams_gets_what_each_gets_alone(live_server: ServerProcess) -> None:
    prompts = [f"Sort these numbers: {i} {9 - i} 4 {i + 3}" for i in range(12)]

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{live_server.url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(prompt: str) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=ask(prompt), temperature=0, max_tokens=32, stream=True
                )
                parts = [c.choices[0].delta.content or "" async for c in stream]
                return "".join(parts)

            alone = [await one(prompt) for prompt in prompts]
            together = await asyncio.gather(*(one(prompt) for prompt in prompts))
            return alone, list(together)

    alone, together = asyncio.run(run())
    assert together == alone


def test_a_repeated_prefix_is_reported_as_cached(client: openai.OpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    options = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    first = client.completions.create(prompt=prompt, **options)
    second = client.completions.create(prompt=prompt, **options)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0
    assert first.choices[0].text == second.choices[0].text


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    scored = client.completions.create(
        model=MODEL, prompt="1 2 3 4 5", max_tokens=0, echo=True, logprobs=2
    )
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == "1 2 3 4 5"
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_every_prompt_token_is_ranked(client: openai.OpenAI) -> None:
    scored = client.completions.create(
        model=MODEL, prompt="1 2 3 4 5", max_tokens=0, extra_body={"prompt_logprobs": 1}
    )
    first, *rest = scored.choices[0].to_dict()["prompt_logprobs"]  # type: ignore[misc]
    assert first is None
    assert rest
    for entry in rest:
        own, *likelier = entry.values()
        assert own["rank"] == 1 if not likelier else own["rank"] > 1
        assert all(other["rank"] == 1 and other["logprob"] > own["logprob"] for other in likelier)


def test_a_dropped_stream_frees_its_blocks(live_server: ServerProcess) -> None:
    body = {
        "model": MODEL,
        "prompt": "count",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx2.Client(base_url=live_server.url) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        for _ in range(1000):
            if live_server.metric("vllm:num_requests_running") == 0:
                break
    assert live_server.metric("vllm:num_requests_running") == 0
    assert live_server.metric("vllm:kv_cache_usage_perc") == 0
    assert live_server.metric("vllm:request_success_total") >= 0


def test_a_request_is_logged_once(live_server: ServerProcess) -> None:
    # The server has logged a request before it takes the next.
    for name, path in (("first", "/version"), ("poll", "/health"), ("last", "/version")):
        httpx2.get(live_server.url + path, headers={"x-request-id": f"logged-{name}"})
    lines = live_server.log.splitlines()
    (line,) = [line for line in lines if "logged-first" in line]
    assert "method=GET path=/version status=200 ms=" in line
    assert not any("logged-poll" in line or "HTTP/1.1" in line for line in lines)


def test_overflow_is_a_400_that_clients_recognise(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048") as refusal:
        client.chat.completions.create(model=MODEL, messages=ask("hi"), max_tokens=100_000)
    assert refusal.value.code == "context_length_exceeded"


def test_sigterm_lets_a_running_request_finish_and_exits_zero() -> None:
    server = ServerProcess("--max-model-len", "512", "--shutdown-timeout", "60", is_forked=False)
    server.wait_until_ready()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=MODEL,
            prompt="go",
            max_tokens=150,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        server.process.terminate()
        last = [chunk for chunk in stream if chunk.choices][-1]
    assert last.choices[0].finish_reason == "length"
    assert server.stop() == 0


#: Routes by which balancers learn whether to send requests.
PROBES = ("/health", "/ping", "/ready", "/health_generate", "/v2/health/ready")


def statuses(server: ServerProcess) -> set[int]:
    """Return the statuses of all probes."""
    return {httpx2.get(f"{server.url}{path}").status_code for path in PROBES}


def refuses(server: ServerProcess) -> bool:
    """True if nothing listens at the server's port."""
    try:
        socket.create_connection(("127.0.0.1", server.port)).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        # The listening socket was closed while it had this connection in its queue.
        return False
    return False


@contextmanager
def streaming(server: ServerProcess, num_tokens: int) -> Iterator[Iterator[str]]:
    """Yield the lines of a stream that has begun."""
    url = f"{server.url}/v1/completions"
    body = {"prompt": "1,", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", url, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_probes_say_that_the_server_drains_before_connections_are_refused() -> None:
    server = ServerProcess()
    server.wait_until_ready()
    with streaming(server, 7000) as lines:
        server.process.terminate()
        while httpx2.get(f"{server.url}/health").status_code == 200:
            pass
        assert statuses(server) == {503}
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "1"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        # The stream is far from its end.
        server.process.terminate()
        with pytest.raises(httpx2.TransportError):
            list(lines)
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one", "two"])
def test_requests_are_served_until_balancers_know(flags: tuple[str, ...]) -> None:
    server = ServerProcess(*flags, "--shutdown-delay", "3600")
    server.wait_until_ready()
    body = {"prompt": "1", "max_tokens": 1}
    with httpx2.Client(base_url=server.url) as client:
        assert "connection" not in client.post("/v1/completions", json=body).headers
        server.process.terminate()
        while httpx2.get(f"{server.url}/ready").status_code == 200:
            pass
        assert statuses(server) == {503}
        # The first is sent on the connection that was kept, and ends it.
        for _ in range(2):
            answer = client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    server.process.terminate()
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one", "two"])
def test_after_the_delay_connections_are_refused_and_streams_end(flags: tuple[str, ...]) -> None:
    server = ServerProcess(*flags, "--shutdown-delay", "0.1")
    server.wait_until_ready()
    with streaming(server, 600) as lines:
        server.process.terminate()
        while not refuses(server):
            pass
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.stop() == 0


def test_all_probes_are_listed() -> None:
    routes = routes_of(SLICES + STORING_SLICES)
    paths = {route.path for route in routes if re.search("health|ready$|/ping$", route.path)}
    # Whether the server has to be started again, and whether a net is loaded, are other questions.
    others = {path for path in paths if path == "/v2/health/live" or "/models/" in path}
    assert paths - others == set(PROBES)


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--api-server-count", "2"), marks=pytest.mark.engines)]
)
def test_a_second_signal_ends_running_requests_without_a_traceback(flags: tuple[str, ...]) -> None:
    server = ServerProcess(*flags, is_forked=False)
    server.wait_until_ready()
    body = {"prompt": "1,", "max_tokens": 7000, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        url = f"{server.url}/v1/completions"
        running = [
            pool.submit(httpx2.post, url, json={**body, "stream": stream})
            for stream in (True, False)
        ]
        while server.metric("vllm:num_requests_running") < 2:
            pass
        server.process.send_signal(signal.SIGTERM)
        while "shutting down" not in server.log:
            pass
        server.process.send_signal(signal.SIGTERM)
        # The server waits an hour for running requests (tests/server_process.py).
        assert server.process.wait() == 0
        assert all(isinstance(each.exception(), httpx2.TransportError) for each in running)
    assert "Traceback" not in server.log
    server.stop()


def test_a_batch_file_is_answered_line_by_line(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": ask(f"What is {i} + 1?"), "max_tokens": 8},
        }
        for i in range(6)
    ]
    bad = {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": 1}}
    source.write_text("\n".join([*map(json.dumps, lines), json.dumps(bad), "{not json"]))
    ended = child_process.run(["mlx_parallm", "batch", str(source), str(target)], cwd=ROOT)
    assert ended.returncode == 1  # Status 1: some lines failed.
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    status = {a["custom_id"]: a["response"] and a["response"]["status_code"] for a in answers}
    assert status == {**{str(i): 200 for i in range(6)}, "bad": 400, None: None}
