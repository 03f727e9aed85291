"""Routes of peers, and ``/ready``, of an application with ``--peers`` and of one without."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from mlx_parallm.api.app import REPLICA_SLICES, create_app, routes_of
from mlx_parallm.server_config import ServerConfig
from tests.fake_engine import FakeEngine

PEERS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
ROUTES = [
    (method, path) for route in routes_of(REPLICA_SLICES) for method in route.methods
    for path in route.paths
]  # fmt: skip


def client_of(**settings: Any) -> tuple[httpx2.AsyncClient, Any]:
    app = create_app(FakeEngine(), ServerConfig(**settings))
    transport = httpx2.ASGITransport(app)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost"), app


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_peers_there_are_no_such_routes(method: str, path: str) -> None:
    client, app = client_of()
    async with client:
        assert (await client.request(method, path)).status_code == 404
    assert app.state.replicas is None


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_the_admin_key(method: str, path: str) -> None:
    client, _ = client_of(peers=PEERS, admin_api_keys=("admin",), api_keys=("key",))
    async with client:
        for headers in ({}, {"authorization": "Bearer key"}, {"authorization": "Bearer no"}):
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 401


async def test_a_server_is_not_ready_before_it_has_asked_its_peers() -> None:
    client, app = client_of(peers=PEERS)
    async with client:
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert "has not asked its peers" in answer.json()["error"]["message"]
        app.state.replicas.fleet.is_draining = True
        assert "drained" in (await client.get("/ready")).text


@pytest.mark.parametrize("settings", [{}, {"peers": PEERS}])
async def test_metrics_count_the_servers_of_a_fleet(settings: dict[str, Any]) -> None:
    client, _ = client_of(**settings)
    async with client:
        text = (await client.get("/metrics")).text
    for state, count in (("ready", 0), ("not_ready", 1)):
        line = f'mlx_parallm:fleet_servers{{state="{state}"}} {count}.0'
        assert (line in text) is bool(settings)
