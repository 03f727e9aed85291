"""Sockets, threads and routes of a server: none more than its flags name."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_parallm.cli.settings import SETTINGS
from tests.listeners import Listener
from tests.server_process import ServerProcess
from tests.serving_facts import ANSWER, ASK

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed"),
]

#: LISTENING, ESTABLISHED: states in /proc/net/tcp.
LISTENING, ESTABLISHED = "0A", "01"


@dataclass(frozen=True)
class Facts:
    """Threads and routes of a server; see ``serving_facts``. Ports of its sockets."""

    threads: frozenset[str]
    routes: frozenset[str]
    listening: frozenset[int]
    connected: frozenset[int]


@dataclass(frozen=True)
class Case:
    """A flag, and what it adds.

    Attributes:
        flag: without which nothing of it is there.
        more: its value, with the address of a peer, and flags that it needs.
        threads: the names of its threads.
        routes: the paths of its routes.
        connects: True if the server connects with the peer by itself.
    """

    flag: str
    more: tuple[str, ...] = ()
    threads: frozenset[str] = frozenset()
    routes: frozenset[str] = frozenset()
    connects: bool = False


#: PEER_FLAGS: the beginnings of the names of settings that concern other servers.
PEER_FLAGS = re.compile(r"peer|kv-(peers|serve|across)|prefill-(peer|min)|engine$|shutdown-delay")
#: DETAILS: settings of other flags, which do nothing alone.
DETAILS = {"peer-key", "peer-url", "peer-key-file", "kv-across-devices", "prefill-min-tokens"}
#: PLAIN_THREADS: names without numbers; the first is that of the test, which ends the server.
PLAIN_THREADS = {"parent", "MainThread", "Thread (_watch)", "engine", "watchdog"}
#: OCCASIONAL: threads of pools, which come with work and go.
OCCASIONAL = {"records", "uvloop"}
KV_ROUTES = frozenset({f"/v1/kv/{name}" for name in ("filter", "blocks", "prefill")})
CHANGES = ("state", "journal", "stage", "reserve", "commit", "drop", "apply", "drain")
PEER_ROUTES = frozenset(
    {"/v1/peers", "/v1/contents/{digest}", *(f"/v1/peers/{name}" for name in CHANGES)}
)
CASES = (
    Case("--kv-serve", routes=KV_ROUTES),
    Case("--kv-peers", ("{peer}",), threads=frozenset({"kv-peers"}), connects=True),
    # Only a long prompt is sent there.
    Case("--prefill-peer", ("{peer}",), threads=frozenset({"kv-peers"})),
    Case("--peers", ("{peer}", "--admin-api-key", "k"), routes=PEER_ROUTES, connects=True),
    Case("--shutdown-delay", ("0.1",)),
)


def facts_of(server: ServerProcess, pipes: Path) -> Facts:
    """Return what a server that is ready has."""
    (pipes / ASK).write_bytes(b"")
    known = json.loads((pipes / ANSWER).read_bytes())
    ports = list(tcp_ports(server.process.pid))
    return Facts(
        frozenset(known["threads"]) - OCCASIONAL,
        frozenset(known["routes"]),
        frozenset(ours for state, ours, _ in ports if state == LISTENING),
        frozenset(
            theirs for state, ours, theirs in ports if state == ESTABLISHED and ours != server.port
        ),
    )


def tcp_ports(pid: int) -> Iterator[tuple[str, int, int]]:
    """Yield the state of each TCP socket of a process, its port, and that of the other end."""
    links: list[str] = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(link.readlink()))
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, ours, theirs, state, *rest = row.split()
            if rest[5] in inodes:
                yield state, _port(ours), _port(theirs)


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


@contextmanager
def started(pipes: Path, *flags: str) -> Iterator[ServerProcess]:
    """Yield a server that is ready, and says through pipes what it has."""
    env = {name: str(pipes / name) for name in (ASK, ANSWER)}
    server = ServerProcess(*flags, env=env, program=("tests.serving_facts",))
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipes")
    for name in (ASK, ANSWER):
        os.mkfifo(folder / name)
    return folder


@pytest.fixture(scope="module")
def plain(pipes: Path) -> Facts:
    """Return what a server without any flag has."""
    with started(pipes) as server:
        facts = facts_of(server, pipes)
        assert facts.listening == {server.port}
    return facts


def test_a_server_without_flags(plain: Facts) -> None:
    assert plain.threads == PLAIN_THREADS
    assert not plain.connected
    added = frozenset[str]().union(*(case.routes for case in CASES))
    assert added
    assert not plain.routes & added


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.flag)
def test_a_flag_adds_what_it_names(case: Case, plain: Facts, pipes: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer, ExitStack() as stack:
        port = peer.getsockname()[1]
        flags = [flag.format(peer=f"http://127.0.0.1:{port}") for flag in case.more]
        server = stack.enter_context(started(pipes, case.flag, *flags))
        if case.connects:
            stack.enter_context(peer.accept()[0])
        facts = facts_of(server, pipes)
        assert facts.threads == plain.threads | case.threads
        assert facts.routes == plain.routes | case.routes
        assert facts.listening == {server.port}
        # A peer that does not answer is left, and asked again later.
        assert facts.connected <= ({port} if case.connects else set())


def test_an_engine_elsewhere_adds_its_connection(plain: Facts, pipes: Path) -> None:
    listener = Listener()
    with started(pipes, "--engine", str(listener.address)) as server:
        facts = facts_of(server, pipes)
        assert facts.threads == plain.threads | {"beats", "commands", "silence"}
        assert facts.routes == plain.routes
        assert facts.listening == {server.port}
        assert facts.connected == {listener.address.port}
    listener.stop()


def test_every_flag_is_tried() -> None:
    names = {setting.name for setting in SETTINGS if PEER_FLAGS.match(setting.name)}
    assert names == {case.flag.removeprefix("--") for case in CASES} | DETAILS | {"engine"}
