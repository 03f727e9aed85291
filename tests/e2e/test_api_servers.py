"""`mlx_parallm serve --api-server-count 2`: one server, whichever process speaks HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from websockets.sync.client import connect

from tests.adapter_files import CONFIG, upload
from tests.process_memory import MAX_MB, has_mlx, on_linux, resident_mb
from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
pytestmark = pytest.mark.engines
ASKED = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "extra_body": {"ignore_eos": True}}
RAW = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--api-server-count", "2", "--model", MODEL, "--model", "demo:embed")
    process = ServerProcess(*flags, is_forked=False)
    process.wait_until_ready()
    yield process
    process.stop()


def children(server: ServerProcess, module: str) -> list[int]:
    """Return the ids of the processes of a module that a server has started."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [
        int(pid)
        for pid, parent, words in rows
        if int(parent) == server.process.pid and module in words
    ]


def http_processes(server: ServerProcess) -> list[int]:
    return children(server, "api_servers.process")


def texts(server: ServerProcess, model: str, count: int) -> list[str]:
    """Return the answers to prompts that are asked side by side, each on its own connection."""

    def ask(number: int) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(model=model, prompt=f"{number}, 2, 3,", **ASKED)
            return answer.choices[0].text

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


def is_running(pid: int) -> bool:
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    state = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_answers_of_all_processes_are_counted(server: ServerProcess) -> None:
    sample = re.compile(r'http_requests_total\{handler="/v1/completions",.*status="200"\} (\S+)')

    def counted() -> float:
        text = httpx2.get(f"{server.url}/metrics").text
        return sum(map(float, sample.findall(text)))

    before = counted()
    texts(server, MODEL, 8)
    # Processes report from time to time.
    while counted() < before + 8:
        pass
    assert counted() == before + 8
    usage = re.findall(
        r'process_open_fds\{pid="\d+",process="(\w+)"\}', httpx2.get(f"{server.url}/metrics").text
    )
    if sys.platform == "linux":
        assert sorted(set(usage)) == ["engine", "http", "server"]


@on_linux
def test_processes_without_an_engine_are_small(server: ServerProcess) -> None:
    # The models are loaded, and nothing was asked yet.
    processes = http_processes(server)
    assert len(processes) > 1
    for process in (server.process.pid, *processes):
        assert not has_mlx(process)
        assert resident_mb(process) <= MAX_MB


def test_answers_are_those_of_one_process(
    server: ServerProcess, live_server: ServerProcess
) -> None:
    assert len(http_processes(server)) == 2
    assert texts(server, MODEL, 8) == texts(live_server, MODEL, 8)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        vectors = client.embeddings.create(model="demo:embed", input=["a", "a", "b"]).data
        assert vectors[0].embedding == vectors[1].embedding != vectors[2].embedding
        schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        formed = client.chat.completions.create(
            model=MODEL,
            max_tokens=100,
            messages=[{"role": "user", "content": "1 + 1 ="}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema, "strict": True},
            },
        )
        assert json.loads(formed.choices[0].message.content or "") == {"a": 7}


def test_one_connection_goes_from_process_to_process(server: ServerProcess) -> None:
    # /v1/models and /v1/responses are answered by the first process, the others by HTTP processes.
    with httpx2.Client(base_url=server.url) as http:
        for _ in range(3):
            assert http.get("/v1/models").status_code == 200
            sent = http.post("/v1/completions", json={"model": MODEL, "prompt": "1", **LENGTH})
            assert sent.json()["usage"]["completion_tokens"] == 4
            stored = http.post("/v1/responses", json={"model": MODEL, "input": "1 + 1 ="}).json()
            assert http.get(f"/v1/responses/{stored['id']}").json()["id"] == stored["id"]
            assert http.get("/v1/completions").status_code == 405
            assert http.post("/nothing", content=b"x" * 500_000).status_code == 404
        log = [line for line in server.log.splitlines() if "path=/v1/completions" in line]
        assert len(log) >= 6


LENGTH = {"max_tokens": 4, "ignore_eos": True}


def test_a_connection_becomes_a_websocket_in_the_first_process(server: ServerProcess) -> None:
    address = urlsplit(server.url)
    body = json.dumps({"model": MODEL, "prompt": "1", **LENGTH}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 4
        url = server.url.replace("http", "ws") + "/v1/responses"
        with connect(url, sock=connection, compression=None) as messages:
            request = {
                "type": "response.create",
                "model": MODEL,
                "input": "1 + 1 =",
                "store": False,
            }
            last: dict[str, Any] = {}
            for _ in range(2):
                messages.send(json.dumps(request | {"previous_response_id": last.get("id")}))
                event: dict[str, Any] = {"type": ""}
                while event["type"] not in ("response.completed", "error"):
                    event = json.loads(messages.recv())
                last = event["response"]


def test_requests_that_come_together_are_answered_in_their_order(server: ServerProcess) -> None:
    def request(line: str, body: bytes = b"") -> bytes:
        head = f"{line} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        return f"{head}content-type: application/json\r\n\r\n".encode() + body

    def ask(prompt: str) -> bytes:
        body = json.dumps({"model": MODEL, "prompt": prompt, **LENGTH}).encode()
        return request("POST /v1/completions", body)

    # The second one is read here with the first; the third is for another process.
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(ask("1, 2,") + ask("7, 8,") + request("GET /v1/models"))
        answers = b""
        while data := connection.recv(65536):
            answers += data
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b'"text_completion"') == 2


def test_an_adapter_can_be_named_at_once_in_every_process(server: ServerProcess) -> None:
    with httpx2.Client(base_url=server.url) as http:
        for number in range(3):
            query = {"name": f"p{number}", "config": json.dumps(CONFIG)}
            loaded = http.post(
                "/v1/update_adapter_weights", content=upload(number + 1), params=query, headers=RAW
            )
            assert loaded.status_code == 200, loaded.text
            assert len(texts(server, f"p{number}", 4)) == 4
            assert http.delete(f"/v1/adapters/p{number}").status_code == 200
            with pytest.raises(openai.NotFoundError):
                texts(server, f"p{number}", 4)


def test_what_a_job_has_made_can_be_named_at_once_in_every_process(
    server: ServerProcess,
) -> None:
    row = {"prompt": "1, 2,", "completion": " 3"}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=None) as client:
        content = json.dumps(row).encode()
        file = client.files.create(file=("rows.jsonl", content), purpose="fine-tune").id
        method: Any = {
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 1, "layers": "top:1"}},
        }
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=file, method=method)
        while job.status in ("queued", "running"):
            session = job.to_dict()["session_id"]
            httpx2.get(f"{server.url}/v1/training/sessions/{session}/events", timeout=None)
            job = client.fine_tuning.jobs.retrieve(job.id)
        assert job.fine_tuned_model is not None
        # Requests that come side by side are answered by all processes.
        assert len(texts(server, job.fine_tuned_model, 8)) == 8
        client.models.delete(job.fine_tuned_model)


def test_a_process_that_was_killed_takes_its_own_requests_with_it(server: ServerProcess) -> None:
    def stream(number: int) -> bool:
        """Return True if all of a long answer came."""
        body = {"model": MODEL, "prompt": f"{number}", "max_tokens": 800, "stream": True}
        try:
            with httpx2.stream(
                "POST", f"{server.url}/v1/completions", json={**body, "ignore_eos": True}
            ) as answer:
                return "data: [DONE]" in list(answer.iter_lines())
        except httpx2.RemoteProtocolError:
            return False

    with httpx2.Client(base_url=server.url) as http, ThreadPoolExecutor(4) as pool:
        kept = http.post(
            "/v1/responses", json={"model": MODEL, "input": "17 + 25 =", "background": True}
        ).json()
        streams = [pool.submit(stream, number) for number in range(4)]
        while server.metric("vllm:num_requests_running") < 4:
            assert http.get("/health").status_code == 200
        killed = http_processes(server)[0]
        os.kill(killed, signal.SIGKILL)
        assert {each.result() for each in streams} == {False, True}
        while server.metric("vllm:num_requests_running"):
            assert http.get("/health").status_code == 200
        while len(http_processes(server)) < 2 or killed in http_processes(server):
            assert http.get("/health").status_code == 200
        while http.get(f"/v1/responses/{kept['id']}").json()["status"] != "completed":
            pass
    assert len(texts(server, MODEL, 4)) == 4


def test_every_process_ends_with_its_server(server: ServerProcess) -> None:
    # The last test of this module: there is no server after it.
    processes = [*http_processes(server), *children(server, "engine_process")]
    assert len(processes) >= 3, server.log
    server.process.kill()
    server.process.wait()
    while any(is_running(pid) for pid in processes):
        pass
