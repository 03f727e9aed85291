"""The middleware acts on the facts that routes declare; no other table lists their paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

import mlx_parallm.api
from mlx_parallm.api.app import create_app
from mlx_parallm.api.http.body_budget import BodyBudgetMiddleware
from mlx_parallm.api.http.declared import SMALL_BODY_BYTES, Access, Kept
from mlx_parallm.api.http.dialect import Failure
from mlx_parallm.api.http.middleware import RouteMiddleware
from mlx_parallm.api.http.openapi import ADMIN_KEY, API_KEY
from mlx_parallm.api.http.routing import ROUTE, DeclaredRoute, RouteIndex, Routes, declared_routes
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import OverloadedError, RequestTooLargeError
from tests.fake_engine import FakeEngine

KEYS: dict[str, Any] = {"api_keys": ("key",), "admin_api_keys": ("admin",)}
#: Every limit is another one.
LIMITS: dict[str, Any] = {
    "max_body_bytes": 100_000,
    "max_tokenize_bytes": 110_000,
    "max_adapter_bytes": 120_000,
    "max_weights_bytes": 130_000,
    "max_file_bytes": 140_000,
    "max_client_body_bytes": 150_000,
}
#: Methods and paths that need no key.
OPEN = {
    "GET /health", "GET /ping", "POST /ping", "GET /ready", "GET /load", "GET /version",
    "GET /metrics", "GET /docs", "GET /docs/assets/x", "GET /openapi.json", "GET /", "GET /page/x",
    "GET /v2", "GET /v2/health/live", "GET /v2/health/ready",
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    return ServerConfig(**KEYS, **LIMITS, data_dir=str(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def app(config: ServerConfig) -> Any:
    return create_app(FakeEngine(), config)


def operations(app: Any) -> Iterator[tuple[DeclaredRoute, str, str]]:
    """Each route with each of its methods and each path, filled in."""
    for route in declared_routes(app):
        for method in sorted(route.methods):
            for path in route.paths:
                yield route, method, re.sub(r"\{[^}]*\}", "x", path)


async def answer(app: Any, method: str, path: str, key: str | None = None) -> httpx2.Response:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    headers = {} if key is None else {"x-api-key": key}
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.request(method, path, headers=headers)


def test_all_routes_declare_themselves(app: Any) -> None:
    assert declared_routes(app) == app.router.routes


async def test_access_is_what_the_route_says(app: Any) -> None:
    opened = set()
    for route, method, path in operations(app):
        # A form of no type is refused before anything is stored or changed.
        without = await answer(app, method, path)
        if route.facts.access is Access.OPEN:
            opened.add(f"{method} {path}")
        assert (without.status_code == 401) == (route.facts.access is not Access.OPEN), path
        if route.facts.access is Access.ADMIN:
            assert (await answer(app, method, path, "key")).status_code == 401, path
    assert opened == OPEN


async def test_errors_are_in_the_dialect_of_the_route(app: Any) -> None:
    failure = Failure(http=401, type="", message="")
    for route, method, path in operations(app):
        if route.facts.access is Access.OPEN:
            continue
        content = (await answer(app, method, path)).json()
        shape = route.facts.dialect.error_body(failure, "id")
        assert set(content) == set(shape), path
        second = route.facts.dialect.id_header
        assert second is None or second in (await answer(app, method, path)).headers


@pytest.mark.parametrize("by_header", [True, False])
async def test_bodies_are_limited_as_the_route_says(
    app: Any, config: ServerConfig, by_header: bool
) -> None:
    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    around = RouteMiddleware(BodyBudgetMiddleware(read, config), declared_routes(app))

    async def takes(method: str, path: str, size: int) -> bool:
        async def receive() -> Any:
            return {"type": "http.request", "body": bytes(size)}

        headers = [(b"content-length", str(size).encode())] if by_header else []
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        try:
            await around(scope, receive, receive)  # type: ignore[arg-type]
        except RequestTooLargeError:
            return False
        return True

    seen = set()
    for route, method, path in operations(app):
        limit = route.facts.body_limit.size(config)
        assert await takes(method, path, limit), path
        assert not await takes(method, path, limit + 1), path
        seen.add(limit)
    assert len(seen) == 6
    assert await takes("POST", "/nowhere", SMALL_BODY_BYTES)
    assert not await takes("POST", "/nowhere", SMALL_BODY_BYTES + 1)


async def test_bodies_are_counted_as_the_route_says(app: Any, config: ServerConfig) -> None:
    """Send a second body of a client that has used most of its memory; see ``Kept``."""
    inner: Any = None

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if inner is not None:
            await inner(receive)

    around = RouteMiddleware(BodyBudgetMiddleware(enter, config), declared_routes(app))

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(100_000)}

    for route, method, path in operations(app):
        refused = False

        async def second(_: Receive, method: str = method, path: str = path) -> None:
            nonlocal inner, refused
            inner = None
            try:
                await around(scope(method, path), receive, receive)  # type: ignore[arg-type]
            except OverloadedError:
                refused = True

        inner = second
        await around(scope("POST", "/v1/chat/completions"), receive, receive)  # type: ignore[arg-type]
        assert refused == (route.facts.body_limit.kept is Kept.REQUEST), path


def scope(method: str, path: str) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": []}


async def test_a_batch_may_hold_what_says_so(app: Any) -> None:
    transport = httpx2.ASGITransport(app)
    batchable = [route.path for route in declared_routes(app) if route.facts.batchable]
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        for path in sorted({route.path for route in declared_routes(app)}):
            body = {"input_file_id": "file-none", "endpoint": path, "completion_window": "24h"}
            answer = await client.post("/v1/batches", json=body, headers={"x-api-key": "key"})
            content = answer.json()
            is_refused = content["error"]["param"] == "endpoint"
            assert is_refused == (path not in batchable), path
    assert "/v1/chat/completions" in batchable
    assert len(batchable) == 12


def test_the_document_says_who_may_use_a_route(app: Any) -> None:
    document = app.openapi()
    keys = {Access.OPEN: [], Access.KEY: [{API_KEY: []}], Access.ADMIN: [{ADMIN_KEY: []}]}
    for route in declared_routes(app):
        for method in route.methods if route.include_in_schema else ():
            operation = document["paths"][route.path_format][method.lower()]
            needed = operation.get("security", document["security"])
            assert needed == keys[route.facts.access], route.path


async def test_what_lies_below_a_route_speaks_its_dialect(app: Any) -> None:
    error = (await answer(app, "POST", "/v1/messages/batches", "key")).json()
    assert error["type"] == "error"


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the texts of a module that are neither documentation nor the path of a declaration."""
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left_out.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            left_out.update(node.values)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call):
                    left_out.update(decorator.args)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            yield node


def test_no_table_of_paths_comes_back(app: Any) -> None:
    paths = {path for route in declared_routes(app) for path in route.paths}
    paths = {end for path in paths for end in (path, path.removeprefix("/v1"))} - {"/"}
    folder = Path(mlx_parallm.api.__file__).parent
    repeated = [
        f"{file.relative_to(folder)}:{text.lineno}: {text.value}"
        for file in sorted(folder.rglob("*.py"))
        for text in texts(ast.parse(file.read_text()))
        if text.value in paths
    ]
    assert repeated == []


def test_the_chosen_route_is_the_one_that_matching_finds(app: Any) -> None:
    routes = list(declared_routes(app))
    index = RouteIndex.of(routes)
    paths = {path for _, _, path in operations(app)} | {"/none", "/v1/none", "/v1/embeddings/"}
    chosen_paths = set[str]()
    for path in paths:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "NONE"):
            chosen = index.chosen(method, path)
            served = "GET" if method == "HEAD" else method
            scope = {"type": "http", "method": served, "path": path, "headers": []}
            full = [each for each in routes if each.matches(dict(scope))[0] is Match.FULL]
            if chosen is None:
                continue
            chosen_paths.add(path)
            assert chosen is full[0], (method, path)
            assert chosen.facts is index.find(method, path)
            known = {**scope, ROUTE: chosen}
            matching = [each for each in routes if each.matches(dict(known))[0] is not Match.NONE]
            assert matching == [chosen]
    literal = {path for route, _, path in operations(app) if "{" not in route.path}
    assert chosen_paths == literal


def test_a_pattern_that_comes_first_is_found_by_matching() -> None:
    routes = Routes("Group")

    @routes.get("/things/{name}")
    async def thing(name: str) -> str:
        return name

    @routes.get("/things/all")
    @routes.post("/things/all")
    async def everything() -> str:
        return "all"

    index = RouteIndex.of(routes.all)
    assert index.chosen("GET", "/things/all") is None
    chosen = index.chosen("POST", "/things/all")
    assert chosen is not None
    assert chosen.methods == {"POST"}
