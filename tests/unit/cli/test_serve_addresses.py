"""A server answers on every address that its host has."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from mlx_parallm.api.http.listener import LOCALHOST, bind_all
from mlx_parallm.cli.serve import _OwnHttp, widest_host
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine


async def test_localhost_is_answered_on_each_loopback_address() -> None:
    listeners = bind_all(LOCALHOST, 0)
    server = _OwnHttp(make_app(FakeEngine(), ServerConfig(), bound_to="127.0.0.1"), ServerConfig())
    running = asyncio.create_task(server.run(listeners))
    await server.uvicorn.is_up.wait()
    async with httpx2.AsyncClient() as client:
        for listener in listeners:
            host, port = listener.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            assert (await client.get(f"{url}/health")).status_code == 200
    server.uvicorn.should_exit = True
    await running


@pytest.mark.parametrize(
    ("hosts", "widest"),
    [
        (["127.0.0.1", "::1"], "127.0.0.1"),
        (["::1", "192.168.0.4"], "192.168.0.4"),
        (["fe80::1%eth0", "::1"], "fe80::1%eth0"),
        (["0.0.0.0"], "0.0.0.0"),
    ],
)
def test_a_server_is_as_exposed_as_its_widest_address(hosts: list[str], widest: str) -> None:
    assert widest_host(hosts) == widest
