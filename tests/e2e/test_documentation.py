"""The pages a browser sees need nothing from elsewhere."""

from __future__ import annotations

import re
from typing import Any

import httpx2

from tests.server_process import ServerProcess


def test_every_asset_of_the_documentation_is_served_here(live_server: ServerProcess) -> None:
    page = httpx2.get(f"{live_server.url}/docs").text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert links
    for link in links:
        assert link.startswith("/")
        assert httpx2.get(live_server.url + link).status_code == 200


def test_the_schema_lists_the_routes(live_server: ServerProcess) -> None:
    schema = httpx2.get(f"{live_server.url}/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= set(
        schema["paths"]
    )
    assert set(_answers(schema, "/v1/responses")) == {"application/json", "text/event-stream"}
    assert set(_answers(schema, "/metrics", "get")) == {"text/plain"}
    assert "temperature" in schema["components"]["schemas"]["ChatRequest"]["properties"]


def _answers(schema: dict[str, Any], path: str, method: str = "post") -> dict[str, Any]:
    return schema["paths"][path][method]["responses"]["200"]["content"]
