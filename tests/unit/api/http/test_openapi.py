"""The OpenAPI document: groups, and keys; and /docs, which shows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_parallm.api.http.openapi import ADMIN_KEY, API_KEY, CONTROL, GROUPS
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

KEYS = ServerConfig(api_keys=("key",))
BOTH = ServerConfig(api_keys=("key",), admin_api_keys=("admin",))
CHAT = "/v1/chat/completions"
#: ``ANSWERS_BEFORE``: routes that take the body of another one, and answer before anything streams,
#: or refuse to stream.
ANSWERS_BEFORE = re.compile(r"/(render|count_tokens|input_tokens|completions/batch)$")


def document_of(config: ServerConfig) -> dict[str, Any]:
    return make_app(FakeEngine(), config).openapi()


def needed(document: dict[str, Any], method: str, path: str) -> list[dict[str, Any]]:
    return document["paths"][path][method].get("security", document["security"])


def test_the_document_begins_with_chat_and_every_operation_is_in_one_group(tmp_path: Path) -> None:
    document = document_of(ServerConfig(data_dir=str(tmp_path)))
    assert next(iter(document["paths"])) == CHAT
    assert [tag["name"] for tag in document["tags"]] == list(GROUPS)
    assert next(iter(GROUPS)) == "chat"
    groups = [
        operation["tags"]
        for operations in document["paths"].values()
        for operation in operations.values()
    ]
    assert all(len(names) == 1 for names in groups)
    assert {name for (name,) in groups} == set(GROUPS)
    assert document["paths"]["/v1/models/load"]["post"]["tags"] == [CONTROL]


@pytest.mark.parametrize(
    ("config", "names", "of_chat", "of_control"),
    [
        (ServerConfig(), [API_KEY], [{}, {API_KEY: []}], [{}, {API_KEY: []}]),
        (KEYS, [API_KEY], [{API_KEY: []}], [{API_KEY: []}]),
        (BOTH, [API_KEY, ADMIN_KEY], [{API_KEY: []}], [{ADMIN_KEY: []}]),
    ],
)
def test_the_document_tells_which_key_opens_what(
    config: ServerConfig, names: list[str], of_chat: list[Any], of_control: list[Any]
) -> None:
    document = document_of(config)
    schemes = document["components"]["securitySchemes"]
    assert list(schemes) == names
    assert all(
        (scheme["type"], scheme["scheme"]) == ("http", "bearer") for scheme in schemes.values()
    )
    assert needed(document, "post", CHAT) == of_chat
    assert needed(document, "post", "/pause") == of_control
    assert needed(document, "get", "/health") == []


def test_no_operation_that_needs_a_key_is_told_to_be_open(tmp_path: Path) -> None:
    config = ServerConfig(api_keys=("key",), data_dir=str(tmp_path))
    document = document_of(config)
    assert document is not document_of(ServerConfig())
    opened = {
        path
        for path, operations in document["paths"].items()
        for method in operations
        if not needed(document, method, path)
    }
    triton = {"/v2", "/v2/health/live", "/v2/health/ready"}
    assert opened == triton | {"/health", "/ping", "/ready", "/load", "/version", "/metrics"}


def test_the_document_is_made_once() -> None:
    app = make_app(FakeEngine(), KEYS)
    assert app.openapi() is app.openapi()


async def test_docs_are_folded() -> None:
    transport = httpx2.ASGITransport(make_app(FakeEngine(), ServerConfig()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        text = (await client.get("/docs")).text
    assert '"docExpansion": "none"' in text
    assert '"defaultModelsExpandDepth": 0' in text


@pytest.mark.parametrize(
    ("field", "choice", "content_type"),
    [
        ("stream", None, "text/event-stream"),
        ("encoding_format", "bytes", "application/octet-stream"),
    ],
)
def test_operations_declare_every_content_type_that_a_body_can_ask_for(
    field: str, choice: str | None, content_type: str
) -> None:
    document = document_of(ServerConfig())
    asking = {
        path: operation
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if takes(document, operation, field, choice) and not ANSWERS_BEFORE.search(path)
    }
    assert len(asking) >= 2
    for path, operation in asking.items():
        own = "application/x-ndjson" if path.startswith("/api/") else content_type
        assert own in operation["responses"]["200"]["content"], path


def takes(
    document: dict[str, Any], operation: dict[str, Any], field: str, choice: str | None
) -> bool:
    """True if a body of the operation has a field, which can have this value."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    properties = document["components"]["schemas"].get(name, {}).get("properties", {})
    return field in properties and (choice is None or choice in properties[field].get("enum", ()))
