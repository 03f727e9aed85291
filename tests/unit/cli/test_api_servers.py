"""The lives of HTTP processes, played by processes that only say that they are ready."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.types import Receive, Scope, Send

from mlx_parallm.cli.api_servers import processes
from mlx_parallm.cli.api_servers.connections import ConnectionServer
from mlx_parallm.cli.api_servers.processes import HttpProcesses
from mlx_parallm.peers.messages import StartHttp
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from tests.fakes import FakeRunner, spell
from tests.scripted_engine import engine_of
from tests.scripted_process import builder

# READY: a process that takes connections, and reads no message.
READY = """
import socket, sys, time
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.messages import Ready
channel = Channel(socket.socket(fileno=int(sys.argv[-2])))
channel.send(Ready())
time.sleep(3600)
"""
FAILING = "raise SystemExit(1)"


class Unchanged:
    """Implements ``Shared``."""

    number = 0

    def value(self) -> None:
        """Return nothing."""


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = engine_of(builder(FakeRunner(spell("hello"))))
    engine.start()
    yield engine
    engine.stop()


def no_connection(_: socket.socket, __: bytes) -> None:
    raise AssertionError("no connection comes")


async def no_application(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("no request comes")


def http_processes(
    engine: AsyncEngine, *command: str, restart_delay_s: float = 0.01
) -> HttpProcesses:
    start = StartHttp(engine.config, ServerConfig(), 64, "127.0.0.1", 2)
    return HttpProcesses(
        engine,
        start,
        command,
        shared=Unchanged(),
        adopt=no_connection,
        restart_delay_s=lambda num_deaths: restart_delay_s,
    )


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)


async def test_a_process_that_hangs_is_replaced(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "PING_INTERVAL_S", 0.01)
    monkeypatch.setattr(processes, "PING_TIMEOUT_S", 0.01)
    served = http_processes(engine, sys.executable, "-c", READY)
    with caplog.at_level(logging.WARNING):
        await served.start()
        await until(lambda: caplog.text.count("does not answer") >= 3)
    await served.stop(0)
    assert "another is started" in caplog.text


async def test_a_change_does_not_wait_for_a_process_that_hangs(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "SETTLE_TIMEOUT_S", 0.01)
    served = http_processes(engine, sys.executable, "-c", READY)
    with caplog.at_level(logging.WARNING):
        await served.start()
        await served.settle()
        await until(lambda: caplog.text.count("another is started") == 2)
        await until(lambda: served.are_serving)
    await served.stop(0)


async def test_the_delay_of_a_restart_does_not_delay_the_end(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    served = http_processes(engine, sys.executable, "-c", FAILING, restart_delay_s=3600)
    await served.start()
    assert not served.are_serving
    await until(lambda: caplog.text.count("another is started") == 2)
    await served.stop(0)


async def test_processes_that_cannot_be_started_are_reported(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    served = http_processes(engine, "/nowhere/python", restart_delay_s=3600)
    await served.start()
    assert not served.are_serving
    assert caplog.text.count("an HTTP process cannot be started") == 2
    await served.stop(0)


async def test_a_process_that_starts_while_the_server_stops_ends_too(engine: AsyncEngine) -> None:
    served = http_processes(engine, sys.executable, "-c", READY)
    starting = asyncio.create_task(served.start())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await served.stop(0)
    await starting


async def test_a_connection_whose_client_is_gone_counts_no_more() -> None:
    closed = asyncio.Event()
    server = ConnectionServer(
        no_application,
        ServerConfig(),
        serves=lambda method, path: True,
        hand_over=no_connection,
        on_closed=closed.set,
    )
    connection = socket.socket()
    connection.close()
    server.adopt(connection, b"")
    await closed.wait()
