"""Lines of a batch on their way into the application."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mlx_parallm.api.batch_service import LineSender
from tests.fake_engine import FakeEngine


async def test_a_line_is_no_longer_than_in_its_file() -> None:
    bodies: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        bodies.append(await Request(scope, receive).body())
        await JSONResponse({})(scope, receive, send)

    body: dict[str, Any] = {"prompt": "語" * 99 + "\ud800"}
    response = await LineSender(app, FakeEngine(), None)("me", "/v1/completions", body, "id")
    assert response.status_code == 200
    (sent,) = bodies
    assert json.loads(sent) == body
    assert len(sent) < 3 * 99 + 30
