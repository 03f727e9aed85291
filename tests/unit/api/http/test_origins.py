"""Pages of other origins change nothing, unless CORS allows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

from mlx_parallm.api.http.auth import SAFE_METHODS, is_foreign
from mlx_parallm.api.http.openapi import CONTROL
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

FOREIGN = {"origin": "http://evil.example"}
CROSS_SITE = {"sec-fetch-site": "cross-site"}
FORM = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
BODIES = {
    "application/json": b"{}",
    "text/plain": b"{}",
    "application/x-www-form-urlencoded": b"a=b",
    "application/octet-stream": b"x",
    "multipart/form-data; boundary=b": FORM,
}


def app_of(folder: Path, **settings: object) -> FastAPI:
    config = ServerConfig(data_dir=str(folder), access_log=False, **settings)  # type: ignore[arg-type]
    return make_app(FakeEngine(), config)


def client_of(app: FastAPI) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here:8000")


def filled(path: str) -> str:
    return re.sub(r"{[^}]*}", "x", path)


def documented(app: FastAPI) -> Iterator[tuple[str, str, list[str]]]:
    """Each operation of the OpenAPI document: method, path, tags."""
    for path, operations in app.openapi()["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), filled(path), operation.get("tags", [])


def routed(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Each operation that is served, those that the document leaves out too."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            yield from ((method, filled(route.path)) for method in route.methods or ())


async def test_no_operation_takes_anything_from_a_page_of_another_origin(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    operations = {(method, path) for method, path, _ in documented(app)} | set(routed(app))
    changing = sorted(operation for operation in operations if operation[0] not in SAFE_METHODS)
    assert ("POST", "/v1/files") in changing
    assert len(changing) > 60
    async with client_of(app) as client:
        for method, path in changing:
            for headers in (FOREIGN, {"origin": "null"}, CROSS_SITE):
                for content_type, content in BODIES.items():
                    sent = headers | {"content-type": content_type}
                    answer = await client.request(method, path, content=content, headers=sent)
                    assert answer.status_code == 403, (method, path, sent)


async def test_no_control_operation_answers_a_page_of_another_origin(tmp_path: Path) -> None:
    """With GET neither: ``/flush_cache`` changes something, and images send no ``Origin``."""
    app = app_of(tmp_path, allowed_origins=("*",))
    control = [(method, path) for method, path, tags in documented(app) if CONTROL in tags]
    assert ("GET", "/flush_cache") in control
    async with client_of(app) as client:
        for method, path in control:
            for headers in (FOREIGN, {"origin": "null"}, CROSS_SITE):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 403, (method, path, headers)


@pytest.mark.parametrize("path", ["/v1/messages", "/pause_generation", "/v1/files"])
async def test_a_refusal_has_the_form_of_its_dialect(path: str, tmp_path: Path) -> None:
    async with client_of(app_of(tmp_path)) as client:
        body = (await client.post(path, headers=FOREIGN)).json()
    assert body["error"]["type"] == "permission_error"
    assert ("request_id" in body) is (path == "/v1/messages")
    assert ("success" in body) is (path == "/pause_generation")


async def test_a_form_of_another_page_is_not_stored(tmp_path: Path) -> None:
    files = {"file": ("a.jsonl", b"{}")}
    async with client_of(app_of(tmp_path)) as client:
        refused = await client.post(
            "/v1/files", files=files, data={"purpose": "batch"}, headers=FOREIGN
        )
        assert refused.status_code == 403
        assert (await client.get("/v1/files")).json()["data"] == []
        stored = await client.post("/v1/files", files=files, data={"purpose": "batch"})
        assert stored.status_code == 200


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({}, {}, 400),
        ({}, {"origin": "http://here:8000"}, 400),
        ({}, {"origin": "HTTP://HERE:8000"}, 400),
        ({}, FOREIGN, 403),
        ({"allowed_origins": ("http://evil.example",)}, FOREIGN, 400),
        ({"allowed_origins": ("http://evil.example",)}, FOREIGN | CROSS_SITE, 400),
        ({"allowed_origins": ("http://evil.example",)}, CROSS_SITE, 403),
        ({"allowed_origins": ("http://other.example",)}, FOREIGN, 403),
        ({"allowed_origins": ("*",)}, FOREIGN, 400),
        ({"allowed_origins": ("*",)}, {"origin": "null"}, 400),
        ({"allowed_origins": ("*",), "allowed_methods": ("GET",)}, FOREIGN, 403),
        ({"allowed_origins": ("*",), "allowed_methods": ("GET", "POST")}, FOREIGN, 400),
    ],
)
async def test_cors_settings_allow_pages(
    settings: dict[str, tuple[str, ...]], headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    async with client_of(app_of(tmp_path, **settings)) as client:
        answer = await client.post("/v1/chat/completions", json={}, headers=headers)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ([], False),
        ([("origin", "http://here:8000")], False),
        ([("origin", "https://here:8000")], False),
        ([("origin", "http://here")], True),
        ([("origin", "http://here:8000.evil.example")], True),
        ([("origin", "http://here:8000"), ("origin", "http://evil.example")], True),
        ([("origin", "")], True),
        ([("origin", "null")], True),
        ([("origin", "http://[")], True),
        ([("sec-fetch-site", "same-origin")], False),
        ([("sec-fetch-site", "none")], False),
        ([("sec-fetch-site", "same-site")], True),
        ([("sec-fetch-site", "cross-site")], True),
        ([("sec-fetch-site", "cross-site"), ("origin", "http://here:8000")], True),
        ([("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")], True),
        ([("origin", "capacitor://here:8000")], True),
        ([("origin", "chrome-extension://here:8000")], True),
        ([("origin", "//here:8000")], True),
        # A proxy that names the server by another host than the browser did.
        ([("sec-fetch-site", "same-origin"), ("origin", "https://llm.example")], False),
    ],
)
def test_who_sent_a_request_is_read_from_its_headers(
    headers: list[tuple[str, str]], foreign: bool
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in [("host", "here:8000"), *headers]]
    assert is_foreign(Headers(raw=raw)) is foreign


def test_without_a_host_no_origin_is_its_own() -> None:
    assert is_foreign(Headers({"origin": "null"}))
