"""Bodies that are cut off are answered by 499 at every route."""

from __future__ import annotations

import re
from typing import Any

from starlette.types import ASGIApp

from mlx_parallm.api.app import SLICES, routes_of
from mlx_parallm.api.http.errors import CLIENT_CLOSED
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

#: READERS: routes that read their bodies themselves.
READERS = {
    "POST /load_lora_adapter_from_tensors",
    "POST /update_weights",
    "POST /update_weights_from_tensor",
    "POST /v1/predict",
    "POST /v1/rl/act",
    "POST /v1/update_adapter_weights",
}
OTHERS = {
    f"{method} {re.sub(r'{[^}]*}', 'x', route.path)}"
    for route in routes_of(SLICES)
    for method in route.methods
    if route.body_field is not None
}


async def status_of_cut(app: ASGIApp, method: str, path: str) -> int:
    messages = iter([{"type": "http.request", "body": b'{"a', "more_body": True}])
    statuses: list[int] = []

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    await app(scope, receive, send)
    (status,) = statuses
    return status


async def test_a_body_that_is_cut_off_is_499_at_every_route() -> None:
    app = make_app(FakeEngine(), ServerConfig())
    routes = OTHERS | READERS
    statuses = {route: await status_of_cut(app, *route.split()) for route in routes}
    assert {route: status for route, status in statuses.items() if status != CLIENT_CLOSED} == {}
