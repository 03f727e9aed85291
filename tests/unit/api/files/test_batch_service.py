"""Lines of a batch on their way into the application."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mlx_parallm.api.files.service import LineSender
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.storage.disk import FolderLock
from tests.api_app import make_app
from tests.fake_engine import FakeEngine


async def test_a_line_is_no_longer_than_in_its_file() -> None:
    bodies: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        bodies.append(await Request(scope, receive).body())
        await JSONResponse({})(scope, receive, send)

    body: dict[str, Any] = {"prompt": "語" * 99 + "\ud800"}
    response = await LineSender(app, None)("me", "/v1/completions", body, "id")
    assert response.status_code == 200
    (sent,) = bodies
    assert json.loads(sent) == body
    assert len(sent) < 3 * 99 + 30


async def test_files_of_a_folder_that_another_process_has_are_503(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    app = make_app(FakeEngine(), ServerConfig(data_dir=str(tmp_path)))
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ("/v1/files", "/v1/batches"):
            answer = await client.get(path)
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["code"] == "storage_in_use"
            assert f"process {os.getpid()}" in error["message"]
        lock.release()
        assert (await client.get("/v1/files")).status_code == 200
    await app.state.batches.stop()
