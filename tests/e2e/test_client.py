"""``mlx_parallm.client`` against a real server, and against answers no server should give."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable

import httpx2
import pytest

from mlx_parallm.api.http.listener import bind
from mlx_parallm.client import (
    RequestFailedError,
    RLClient,
    ServerUnreachableError,
    SyncRLClient,
    UnexpectedAnswerError,
    VersionSpan,
)
from tests.server_process import ServerProcess

CHAT = [{"role": "user", "content": "What is 17 + 25?"}]
NO_THINKING = {"enable_thinking": False}


@pytest.fixture
async def client(live_server: ServerProcess) -> AsyncIterator[RLClient]:
    async with RLClient(live_server.url) as client:
        yield client


async def test_a_rollout_has_tokens_logprobs_and_versions(client: RLClient) -> None:
    rollout = await client.rollout(
        ["1, 2, 3,", CHAT, [5, 6, 7], {"text": "a", "metadata": {"row": 7}}],
        n=2,
        max_tokens=6,
        seed=1,
        top_logprobs=2,
        entropy=True,
        prompt_logprobs=0,
        chat_template_kwargs=NO_THINKING,
    )
    assert [group.prompt.index for group in rollout.groups] == [0, 1, 2, 3]
    assert rollout.groups[2].prompt.token_ids == [5, 6, 7]
    assert rollout.groups[3].prompt.metadata == {"row": 7}
    assert rollout.groups[1].samples[0].text == "17 + 25"
    assert rollout.usage["completion_tokens"] == sum(
        len(sample.token_ids) for sample in rollout.samples
    )
    for number, sample in enumerate(rollout.samples):
        assert sample.index == number % 2
        length = len(sample.token_ids)
        assert len(sample.logprobs) == length
        assert max(sample.logprobs) <= 0
        assert sample.versions == [VersionSpan("default", 0, length)]
        assert sample.top_logprobs is not None
        assert [len(top) for top in sample.top_logprobs] == [2] * length
        assert sample.entropy is not None
        assert len(sample.entropy) == length
        logprobs = sample.prompt.logprobs
        assert logprobs is not None
        assert [logprob is None for logprob in logprobs] == [True] + [False] * (len(logprobs) - 1)


async def test_a_stream_has_the_same_samples(client: RLClient) -> None:
    fields = {"n": 3, "max_tokens": 5, "seed": 3, "temperature": 1.5}
    whole = await client.rollout(["1, 2,", CHAT], **fields)
    streamed = [sample async for sample in client.stream_rollout(["1, 2,", CHAT], **fields)]
    ordered = sorted(streamed, key=lambda sample: (sample.prompt.index, sample.index))
    assert [sample.token_ids for sample in ordered] == [
        sample.token_ids for sample in whole.samples
    ]
    assert [sample.prompt.token_ids for sample in ordered] == [
        sample.prompt.token_ids for sample in whole.samples
    ]


def num_aborted(server: ServerProcess) -> float:
    text = httpx2.get(f"{server.url}/metrics").text
    match = re.search(r'request_success_total\{[^}]*"abort"[^}]*\} (\S+)', text)
    return float(match[1]) if match else 0.0


async def test_what_was_sampled_is_scored_the_same(client: RLClient) -> None:
    rollout = await client.rollout(["1, 2, 3,", CHAT], n=2, max_tokens=8, seed=5)
    items = [(sample.prompt.token_ids, sample.token_ids) for sample in rollout.samples]
    scores = await client.logprobs(items, top_logprobs=2, entropy=True)
    for sample, score in zip(rollout.samples, scores, strict=True):
        assert score.logprobs == pytest.approx(sample.logprobs, abs=1e-4)
        assert score.version == "default"
        assert score.top_logprobs is not None
        assert score.entropy is not None
        assert len(score.top_logprobs) == len(score.entropy) == len(sample.token_ids)
    with pytest.raises(RequestFailedError) as refused:
        await client.logprobs([([1], [])])
    assert refused.value.status == 400


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - another process is asked
        await asyncio.sleep(0.01)


async def test_a_stream_that_is_left_ends_at_the_server(
    client: RLClient, live_server: ServerProcess
) -> None:
    before = num_aborted(live_server)
    samples = client.stream_rollout(["a", "b"], n=4, max_tokens=1500, ignore_eos=True)
    task = asyncio.ensure_future(anext(samples))
    await until(lambda: live_server.metric("vllm:num_requests_running") > 0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until(lambda: num_aborted(live_server) >= before + 2)


async def test_refusals_name_the_field(client: RLClient) -> None:
    with pytest.raises(RequestFailedError, match="n") as refused:
        await client.rollout(["a"], n=0)
    assert (refused.value.status, refused.value.param) == (400, "n")
    with pytest.raises(RequestFailedError) as unknown:
        await client.rollout(["a"], model="nobody")
    assert (unknown.value.status, unknown.value.code) == (404, "model_not_found")
    with pytest.raises(RequestFailedError) as streamed:
        await anext(client.stream_rollout(["a"], model="nobody"))
    assert streamed.value.status == 404
    await client.wait_until_ready()


async def test_a_server_that_is_not_there_is_told() -> None:
    with bind("127.0.0.1", 0) as silent:
        host, port = silent.getsockname()
        async with RLClient(f"http://{host}:{port}") as client:
            with pytest.raises(ServerUnreachableError):
                await client.wait_until_ready(timeout_s=0.3)  # time limit: the subject
            with pytest.raises(ServerUnreachableError, match="127"):
                await client.rollout(["a"])


@contextlib.asynccontextmanager
async def answering(body: bytes, status: str = "200 OK") -> AsyncIterator[str]:
    """Yield the address of a server that answers every request with this body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("body", [b"no JSON", b"[]", b"{}", b'{"id": "a", "groups": 3}'])
async def test_another_form_of_answer_is_told(body: bytes) -> None:
    async with answering(body) as url, RLClient(url) as client:
        with pytest.raises(UnexpectedAnswerError):
            await client.rollout(["a"])


async def test_an_error_of_a_proxy_is_told() -> None:
    async with answering(b"<html>", "502 Bad Gateway") as url, RLClient(url) as client:
        with pytest.raises(RequestFailedError, match="502: <html>") as refused:
            await client.rollout(["a"])
    assert refused.value.status == 502


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


SAMPLE = {
    "type": "sample",
    "index": 0,
    "token_ids": [1],
    "logprobs": [-0.5],
    "text": "a",
    "finish_reason": "stop",
    "weight_versions": [],
}


async def test_a_failed_prompt_is_told_after_the_other_samples() -> None:
    body = (
        event(type="error", prompt_index=0, error={"message": "it failed"})
        + event(**SAMPLE, prompt_index=1, prompt={"index": 1})
        + event(type="usage", usage={})
    )
    async with answering(body) as url, RLClient(url) as client:
        samples = client.stream_rollout(["a", "b"])
        assert (await anext(samples)).text == "a"
        with pytest.raises(RequestFailedError, match="it failed"):
            await anext(samples)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (event(**SAMPLE, prompt_index=1, prompt={"index": 1}), ServerUnreachableError),
        (event(**SAMPLE | {"logprobs": []}, prompt_index=1, prompt={}), UnexpectedAnswerError),
        (event(**SAMPLE | {"logprobs": []}, prompt_index=1, prompt={"index": 1}),
         UnexpectedAnswerError),
        (b"data: [1]\n\n", UnexpectedAnswerError),
        (b"data: {\n\n", UnexpectedAnswerError),
    ],
)  # fmt: skip
async def test_a_broken_stream_is_told(body: bytes, error: type[Exception]) -> None:
    async with answering(body) as url, RLClient(url) as client:
        with pytest.raises(error):
            _ = [sample async for sample in client.stream_rollout(["a"])]


def test_the_synchronous_client_gives_the_same(live_server: ServerProcess) -> None:
    fields = {"n": 3, "max_tokens": 5, "seed": 3, "temperature": 1.5}
    with SyncRLClient(live_server.url) as client:
        client.wait_until_ready()
        whole = client.rollout(["1, 2,", CHAT], **fields)
        streamed = list(client.stream_rollout(["1, 2,", CHAT], **fields))
        aborted = num_aborted(live_server)
        for _ in client.stream_rollout(["1, 2,"], n=8, max_tokens=400, ignore_eos=True):
            break
    ordered = sorted(streamed, key=lambda sample: (sample.prompt.index, sample.index))
    assert [sample.token_ids for sample in ordered] == [
        sample.token_ids for sample in whole.samples
    ]
    assert num_aborted(live_server) >= aborted
