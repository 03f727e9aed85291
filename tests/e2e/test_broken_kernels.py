"""A server on a fake Mac whose kernels stop to compile in the midst of service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.kernels.shim_compile import require_compiler
from tests.server_process import ServerProcess

FLAGS = ("--dtype", "float32", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "32MiB")
COUNTING = {"prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0}
COUNTED = " 4, 5, 6"
# REASON: a part of the compiler's message.
REASON = "unknown type name"


@pytest.fixture(scope="module")
def broken_by(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that breaks the kernels while it exists."""
    return tmp_path_factory.mktemp("mac") / "broken"


@pytest.fixture(scope="module")
def server(broken_by: Path) -> Iterator[ServerProcess]:
    require_compiler()
    program = ("tests.fake_mac", "--broken-by", str(broken_by))
    server = ServerProcess(*FLAGS, program=program, is_forked=False)
    server.wait_until_ready()
    assert "kernels are not used" not in server.log
    yield server
    assert server.stop() == 0


@pytest.fixture(autouse=True)
def mended(broken_by: Path) -> Iterator[None]:
    yield
    broken_by.unlink(missing_ok=True)


def complete(server: ServerProcess, **options: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/completions", json=COUNTING | options)


def texts_of(response: httpx2.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_requests_fail_and_the_server_goes_on(server: ServerProcess, broken_by: Path) -> None:
    assert texts_of(complete(server)) == [COUNTED]
    broken_by.touch()
    for options in ({}, {"n": 3}, {"temperature": 1.0, "logprobs": 2}):
        response = complete(server, **options)
        assert response.status_code == 500
        assert REASON in response.json()["error"]["message"]
    assert httpx2.get(f"{server.url}/health").status_code == 200
    broken_by.unlink()
    assert texts_of(complete(server)) == [COUNTED]
    assert texts_of(complete(server, n=3)) == [COUNTED] * 3
    assert server.metric("vllm:num_requests_running") == 0


async def test_streams_end_with_the_error(server: ServerProcess, broken_by: Path) -> None:
    async def stream(client: httpx2.AsyncClient, has_begun: asyncio.Event) -> list[str]:
        body = COUNTING | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
        lines: list[str] = []
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    lines.append(line.removeprefix("data: "))
                    has_begun.set()
        return lines

    async with httpx2.AsyncClient() as client:
        begun = [asyncio.Event() for _ in range(3)]
        streams = [asyncio.create_task(stream(client, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        await asyncio.to_thread(broken_by.touch)
        for lines in await asyncio.gather(*streams):
            errors = [json.loads(line) for line in lines if "error" in line]
            assert [REASON in error["error"]["message"] for error in errors] == [True]
    await asyncio.to_thread(broken_by.unlink)
    assert texts_of(complete(server)) == [COUNTED]
