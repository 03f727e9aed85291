"""Thousands of connections: each form of server holds them, and survives without descriptors."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx2
import pytest

from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.process_setup.descriptors import raise_descriptor_limit
from tests.server_process import ROOT, ServerProcess, limiting

pytestmark = pytest.mark.slow

MODEL = "mlx-parallm-demo"
NUM_CONNECTIONS = 10_000
# HARD: the hard limit of most tests, as in containers.
HARD = 20_000
FORMS = [
    (),
    ("--engine-process",),
    ("--data-parallel-size", "2"),
    ("--api-server-count", "2"),
    ("--data-parallel-size", "2", "--api-server-count", "2"),
]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def own_limit() -> Iterator[None]:
    """Let this process have as many descriptors as a server."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def processes_of(server: ServerProcess) -> list[int]:
    """Return the ids of a server's processes."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    own = server.process.pid
    return [own, *(pid for pid, parent in rows if parent == own)]


def num_descriptors(server: ServerProcess) -> int:
    """Return how many descriptors the processes of a server have together."""
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes_of(server))


def ask(server: ServerProcess) -> http.client.HTTPConnection:
    """Send a request by a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"model": MODEL, "prompt": "1, 2,", "max_tokens": 4, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def answered(connection: http.client.HTTPConnection) -> str:
    """Return what the model writes."""
    with closing(connection), connection.getresponse() as reply:
        body = json.load(reply)
        assert reply.status == 200, body
    return body["choices"][0]["text"]


def answer(server: ServerProcess) -> str:
    """Return what the model writes, by a connection of its own."""
    return answered(ask(server))


@contextmanager
def idle_connections(server: ServerProcess, count: int) -> Iterator[None]:
    """Have connections on which nothing is sent."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        yield


@on_linux
@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.usefixtures("own_limit")
def test_ten_thousand_idle_connections_are_held(flags: tuple[str, ...]) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < NUM_CONNECTIONS + 500:
        pytest.skip("this process may not have so many descriptors")
    server = ServerProcess(*flags, descriptors=(1024, HARD), is_forked=False)
    server.wait_until_ready()
    limits = {resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in processes_of(server)}
    assert limits == {(HARD, HARD)}
    expected, before = answer(server), num_descriptors(server)
    with idle_connections(server, NUM_CONNECTIONS):
        while num_descriptors(server) < before + NUM_CONNECTIONS:
            pass
        assert answer(server) == expected
        assert httpx2.get(f"{server.url}/health").status_code == 200
    while num_descriptors(server) > before + 100:
        pass
    assert answer(server) == expected
    assert server.stop() == 0


@on_linux
@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.usefixtures("own_limit")
def test_a_server_without_descriptors_goes_on_once_it_has_some(flags: tuple[str, ...]) -> None:
    server = ServerProcess(*flags, descriptors=(1024, 1024), is_forked=False)
    server.wait_until_ready()
    expected, before = answer(server), num_descriptors(server)
    waiting: list[http.client.HTTPConnection] = []
    # Each process has as many as it may have, and some are refused or wait.
    with idle_connections(server, 2 * 1024 + 600):
        assert server.process.poll() is None
        if "--api-server-count" in flags:
            waiting = [ask(server) for _ in range(10)]
    # Those that are given to HTTP processes wait; uvloop's own accept closes them.
    while not waiting and num_descriptors(server) > before + 100:
        pass
    assert [answered(connection) for connection in waiting] == [expected] * len(waiting)
    assert answer(server) == expected
    assert server.stop() == 0


@pytest.mark.usefixtures("own_limit")
def test_the_load_client_has_more_clients_than_a_shell_of_macos_allows() -> None:
    server = ServerProcess()
    server.wait_until_ready()
    flags = ["--base-url", server.url, "--concurrency", "300", "--num-requests", "300"]
    lengths = ["--prompt-lengths", "4", "--output-lengths", "2", "--num-warmups", "0"]
    client = ChildProcess(
        ["mlx_parallm", "bench", "serve", *flags, *lengths],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        preexec_fn=limiting((256, HARD)),
    )
    report, _ = client.communicate()
    assert client.returncode == 0, report
    assert "Too many open files" not in report
    assert server.stop() == 0
