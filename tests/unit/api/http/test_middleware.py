"""Work around every route: the log, limits of bodies, methods."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request
from starlette.datastructures import Headers

from mlx_parallm.api.http.declared import SMALL_BODY_BYTES
from mlx_parallm.api.http.headers import IndexedHeaders, headers_of
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

LARGE = 100_000
MEDIUM = 80_000


def app_of(config: ServerConfig) -> FastAPI:
    """Return the application with two more routes, which declare no limit."""
    app = make_app(FakeEngine(), config)

    @app.post("/other")
    @app.post("/tokenizer")
    async def size(request: Request) -> int:
        return len(await request.body())

    return app


def client_of(app: FastAPI, root_path: str = "") -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app, root_path=root_path)
    return httpx2.AsyncClient(transport=transport, base_url="http://here")


async def in_pieces(size: int) -> AsyncIterator[bytes]:
    yield b" " * (size - 1)
    yield b" "


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    ("path", "limit", "status"),
    [
        ("/v1/chat/completions", LARGE, 400),
        ("/chat/completions", LARGE, 400),
        ("/v1/completions", LARGE, 400),
        ("/completions", LARGE, 400),
        ("/tokenize", MEDIUM, 400),
        ("/detokenize", MEDIUM, 400),
        ("/other", SMALL_BODY_BYTES, 200),
        ("/tokenizer", SMALL_BODY_BYTES, 200),
    ],
)
async def test_each_route_has_its_limit(path: str, limit: int, status: int, declared: bool) -> None:
    headers = {"content-type": "application/json"}
    config = ServerConfig(max_body_bytes=LARGE, max_tokenize_bytes=MEDIUM)
    async with client_of(app_of(config)) as client:
        for size, expected in ((limit, status), (limit + 1, 413)):
            content = b" " * size if declared else in_pieces(size)
            response = await client.post(path, content=content, headers=headers)
            assert response.status_code == expected
    assert response.json()["error"]["code"] == "request_too_large"
    assert f"{limit} bytes" in response.json()["error"]["message"]


class EngineWithInputs(FakeEngine):
    """Serves one more model; None is one that is being loaded."""

    def __init__(self, modalities: Sequence[str] | None) -> None:
        super().__init__()
        loaded = SimpleNamespace(input_modalities=modalities)
        self._other = None if modalities is None else loaded

    def statuses(self) -> Sequence[ModelStatus]:
        first = super().statuses()[0]
        return [first, replace(first, names=("other",), model=self._other)]


@pytest.mark.parametrize(
    ("modalities", "limit"),
    [(None, MEDIUM), (("text",), MEDIUM), (("text", "image"), LARGE), (("image",), LARGE)],
)
async def test_bodies_are_larger_where_a_model_of_any_kind_takes_images(
    modalities: Sequence[str] | None, limit: int
) -> None:
    config = ServerConfig(max_body_bytes=MEDIUM, max_media_body_bytes=LARGE)
    async with client_of(make_app(EngineWithInputs(modalities), config)) as client:
        for size, expected in ((limit, 400), (limit + 1, 413)):
            response = await client.post("/v1/chat/completions", content=b" " * size)
            assert response.status_code == expected


async def test_a_limit_holds_below_a_root_path() -> None:
    async with client_of(app_of(ServerConfig()), root_path="/llm") as client:
        response = await client.post("/llm/tokenize", json={"prompt": " " * LARGE})
    assert response.status_code == 200


async def test_a_large_body_for_no_route_is_not_found() -> None:
    async with client_of(app_of(ServerConfig())) as client:
        response = await client.post("/v1/nothing", content=b" " * LARGE)
    assert response.status_code == 404


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if hasattr(record, "ms")]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "mlx_parallm.api.http.middleware")
    return caplog


@pytest.mark.parametrize(
    ("method", "path", "status", "level"),
    [
        ("GET", "/v1/models", 200, logging.INFO),
        ("GET", "/version", 200, logging.INFO),
        ("GET", "/v1/nothing", 404, logging.INFO),
        ("POST", "/v1/models", 405, logging.INFO),
        ("POST", "/v1/completions", 400, logging.INFO),
        ("GET", "/health", 200, logging.DEBUG),
        ("GET", "/metrics", 200, logging.DEBUG),
        ("GET", "/", 200, logging.INFO),
        ("GET", "/page/app.js", 200, logging.DEBUG),
        ("GET", "/docs/assets/swagger-ui.css", 200, logging.DEBUG),
    ],
)
async def test_a_request_is_one_line_of_the_log(
    log: pytest.LogCaptureFixture, method: str, path: str, status: int, level: int
) -> None:
    async with client_of(app_of(ServerConfig())) as client:
        await client.request(method, path, headers={"x-request-id": "mine"})
    (record,) = logged(log)
    fields: Any = record
    assert (fields.method, fields.path, fields.status) == (method, path, status)
    assert (fields.request_id, fields.levelno) == ("mine", level)
    assert fields.ms >= 0


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
GENERATED = {"model", "prompt_tokens", "completion_tokens", "ttft_ms"}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["ab", "cde"]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", CHAT | {"max_tokens": 9}),
    ],
)
async def test_a_line_has_what_was_generated(
    log: pytest.LogCaptureFixture, path: str, body: dict[str, Any], streams: bool
) -> None:
    engine = FakeEngine()
    async with client_of(make_app(engine, ServerConfig())) as client:
        answer = await client.post(path, json=body | {"model": "org/fake", "stream": streams})
    assert answer.status_code == 200
    (record,) = map(vars, logged(log))
    assert record.keys() >= GENERATED
    assert record["model"] == "org/fake"
    requests = [engine.submitted.get() for _ in range(engine.submitted.qsize())]
    assert record["prompt_tokens"] == sum(len(request.prompt_ids) for request in requests)
    assert record["completion_tokens"] > 0
    assert 0 <= record["ttft_ms"] <= record["ms"]


async def test_a_line_has_the_code_of_the_error(log: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    async with client_of(make_app(engine, ServerConfig())) as client:
        await client.post("/v1/chat/completions", json=CHAT | {"model": "none"})
        await client.post("/v1/chat/completions", json={})
        await client.get("/v1/models")
    unknown, wrong, fine = map(vars, logged(log))
    assert (unknown["error"], wrong["error"]) == ("model_not_found", "invalid_request_error")
    assert not fine.keys() & (GENERATED | {"error"})


async def test_answers_are_counted_by_route_and_status() -> None:
    config = ServerConfig(access_log=False)
    async with client_of(make_app(FakeEngine(), config)) as client:
        for path in ("/v1/models", "/v1/models/none", "/v1/models/other", "/secret/path"):
            await client.get(path)
        await client.head("/health")
        await client.request("MADEUP", "/v1/models")
        metrics = (await client.get("/metrics")).text
    counted = dict(re.findall(r"^http_requests_total\{(.*)\} (\S+)$", metrics, re.MULTILINE))
    assert counted == {
        'handler="/v1/models",method="GET",status="200"': "1.0",
        'handler="/v1/models/{model_id}",method="GET",status="404"': "2.0",
        'handler="other",method="GET",status="404"': "1.0",
        'handler="/health",method="HEAD",status="200"': "1.0",
        'handler="/v1/models",method="other",status="405"': "1.0",
    }
    assert 'mlx_parallm:process_cpu_seconds_total{pid="' in metrics


async def test_a_refused_key_and_a_bug_are_logged_too(log: pytest.LogCaptureFixture) -> None:
    app = app_of(ServerConfig(api_keys=("key",)))

    @app.get("/bug")
    async def bug() -> None:
        raise ZeroDivisionError

    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        await client.get("/bug")
        await client.get("/bug", headers={"x-api-key": "key"})
    statuses = [vars(record)["status"] for record in logged(log)]
    assert statuses == [401, 500]


async def test_a_path_cannot_forge_a_line(log: pytest.LogCaptureFixture) -> None:
    async with client_of(app_of(ServerConfig())) as client:
        await client.get("/a%0Ab")
        await client.get("/" + "x" * 9999)
    paths = [vars(record)["path"] for record in logged(log)]
    assert paths[0] == "/a%0Ab"
    assert len(paths[1]) < 300


async def test_the_log_of_requests_can_be_left_out(log: pytest.LogCaptureFixture) -> None:
    async with client_of(app_of(ServerConfig(access_log=False))) as client:
        await client.get("/v1/models")
    assert logged(log) == []


@pytest.mark.parametrize(
    "path",
    [
        "/health", "/version", "/metrics", "/v1/models", "/models/org/fake", "/docs",
        "/openapi.json", "/docs/assets/swagger-ui.css", "/v1/models/none", "/v1/nothing",
        "/v1/chat/completions",
    ],
)  # fmt: skip
async def test_head_is_get_without_a_body(log: pytest.LogCaptureFixture, path: str) -> None:
    async with client_of(app_of(ServerConfig())) as client:
        get, head = await client.get(path), await client.head(path)
    assert head.status_code == get.status_code
    assert head.content == b""
    own = {"x-request-id": ""}
    if path == "/metrics":
        # The second answer counts the first.
        own["content-length"] = ""
    assert dict(head.headers) | own == dict(get.headers) | own
    assert vars(logged(log)[-1])["method"] == "HEAD"


async def test_head_says_that_the_engine_is_dead() -> None:
    engine = FakeEngine()
    engine.is_dead = True
    async with client_of(make_app(engine, ServerConfig())) as client:
        assert (await client.head("/health")).status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/v1/models/org/fake", "DELETE, GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("HEAD", "/tokenize", "POST"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
        ("POST", "/docs/assets/swagger-ui.css", "GET, HEAD"),
        ("PUT", "/several", "DELETE, GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allowed: str) -> None:
    app = app_of(ServerConfig())

    @app.get("/several")
    async def read() -> None: ...

    @app.delete("/several")
    async def remove() -> None: ...

    async with client_of(app) as client:
        response = await client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert f"{path} does not take the method {method}" in error["message"]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_other_origins_are_told_alike(method: str) -> None:
    config = ServerConfig(allowed_origins=("https://page",))
    async with client_of(app_of(config)) as client:
        response = await client.request(method, "/health", headers={"origin": "https://page"})
    assert response.headers["access-control-allow-origin"] == "https://page"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/docs", "/docs/assets/swagger-ui.css"])
async def test_open_routes_are_open_below_a_root_path(path: str) -> None:
    app = app_of(ServerConfig(api_keys=("key",)))
    async with client_of(app, root_path="/llm") as client:
        assert (await client.get(f"/llm{path}")).status_code == 200
        assert (await client.get("/llm/v1/models")).status_code == 401


async def test_the_documentation_finds_its_parts_below_a_root_path() -> None:
    async with client_of(app_of(ServerConfig()), root_path="/llm") as client:
        page = await client.get("/llm/docs")
        links = re.findall(r"""(?:src=|href=|url: )["']([^"']+)["']""", page.text)
        assert len(links) == 4
        for link in links:
            assert (await client.get(link)).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize",
        "/detokenize",
        "/decode",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
    ],
)
async def test_what_only_tokenises_has_a_bound_that_names_its_setting(path: str) -> None:
    async with client_of(app_of(ServerConfig(max_tokenize_bytes=MEDIUM))) as client:
        response = await client.post(path, content=b" " * (MEDIUM + 1))
    assert response.status_code == 413
    assert f"{MEDIUM} bytes. See --max-body-bytes." in response.json()["error"]["message"]


def test_headers_are_found_as_starlette_finds_them() -> None:
    raw = [(b"x-a", b"1"), (b"x-b", b"2"), (b"x-a", b"3"), (b"x-\xe9", b"\xfc")]
    scope: dict[str, Any] = {"type": "http", "headers": raw}
    indexed, plain = headers_of(scope), Headers(raw=raw)
    assert headers_of(scope) is indexed
    for name in ("x-a", "X-A", "x-b", "x-c", "x-é"):
        assert indexed.get(name) == plain.get(name)
        assert indexed.getlist(name) == plain.getlist(name)
        assert (name in indexed) == (name in plain)
    assert indexed.get("x-c", "none") == "none"
    assert indexed.items() == plain.items()


def test_headers_may_come_in_any_iterable() -> None:
    pairs = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]
    for raw in (pairs, tuple(pairs), iter(pairs), dict.fromkeys(pairs)):
        headers = IndexedHeaders({"headers": raw})
        assert (headers.get("A"), headers.getlist("a"), headers.get("c")) == ("1", ["1", "3"], None)
