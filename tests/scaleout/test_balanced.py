"""Two servers behind each balancer: OpenAI's client, sessions, streams and clients that leave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter

import httpx2
import openai
import pytest

from mlx_parallm.peers import child_process
from tests.scaleout.balancers import HAPROXY, HEADERS, KEY, NGINX, ROUTER, Balancer, balancing
from tests.scaleout.conftest import addresses
from tests.scaleout.requests import MODEL, body, complete, counting, ended_by
from tests.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow

SUITE = "tests/conformance/test_openai_sdk.py"
#: Tests of the suite that do not hold: a file is at the server that took it, and the router writes
#: its own list of models and its own errors.
LEFT_OUT = {
    NGINX: "not files",
    HAPROXY: "not files",
    ROUTER: "not files and not errors and not test_models",
}
SESSIONS = 200


def test_the_suite_of_openais_client_passes(balancer: Balancer, url: str) -> None:
    variables = {"CONFORMANCE_URL": url, "CONFORMANCE_KEY": KEY, "CONFORMANCE_MODEL": MODEL}
    options = ["-q", "-c", "tests/conformance/pytest.ini", "--rootdir", str(ROOT)]
    result = child_process.run(
        ["--", sys.executable, "-m", "pytest", *options, "-k", LEFT_OUT[balancer], SUITE],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_embeddings(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        vectors = client.embeddings.create(model="demo:embed", input=["a", "b"]).data
    assert len(vectors) == 2


def test_files_belong_to_a_session(balancer: Balancer, url: str) -> None:
    if balancer == ROUTER:
        assert httpx2.get(f"{url}/v1/files", headers=HEADERS).status_code == 404
        return
    for number in range(4):
        session = {balancer.session_header: f"files-{number}"}
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key=KEY, default_headers=session, max_retries=0
        ) as client:
            file = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
            assert client.files.retrieve(file.id).id == file.id
            client.files.delete(file.id)


def test_sessions_are_spread(balancer: Balancer, url: str, servers: list[ServerProcess]) -> None:
    with counting(servers) as counts:
        for number in range(SESSIONS):
            assert complete(url, (balancer.session_header, f"spread-{number}")) == 200
    assert sum(counts) == SESSIONS
    assert min(counts) >= 0.3 * SESSIONS


def test_a_session_stays(balancer: Balancer, url: str, servers: list[ServerProcess]) -> None:
    for number in range(4):
        with counting(servers) as counts:
            for _ in range(5):
                assert complete(url, (balancer.session_header, f"stays-{number}")) == 200
        assert sorted(counts) == [0, 5]


def test_requests_without_a_session_are_spread(url: str, servers: list[ServerProcess]) -> None:
    with counting(servers) as counts:
        for number in range(40):
            assert complete(url, ("x-nothing", str(number))) == 200
    assert sum(counts) == 40
    assert min(counts) >= 8


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_ends_its_request(
    url: str, servers: list[ServerProcess], streams: bool
) -> None:
    content = json.dumps(body(1800, stream=streams))
    head = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json"
    port = int(url.rpartition(":")[2])
    before = [ended_by(server) for server in servers]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        length = f"Content-Length: {len(content)}"
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\n{head}\r\n{length}\r\n\r\n{content}".encode()
        )
        while not any(running(server) for server in servers):
            pass
    while (now := [ended_by(server) for server in servers]) == before:
        pass
    ended = sum((now[number] - before[number] for number in range(2)), Counter[str]())
    assert ended == {"abort": 1}


def running(server: ServerProcess) -> float:
    """Return how many sequences a server runs."""
    return server.metric("vllm:num_requests_running")


def test_a_second_nginx_does_not_buffer_either(servers: list[ServerProcess]) -> None:
    if not NGINX.is_installed:
        pytest.skip("nginx is not installed")
    with balancing(NGINX, addresses(servers)) as url:
        request = body(1, stream=True)
        answer = httpx2.post(f"{url}/v1/completions", json=request, headers=HEADERS)
    # The header by which the one in front learns it; nginx keeps it to itself by default.
    assert answer.headers["x-accel-buffering"] == "no"
