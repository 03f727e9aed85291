"""Requests of tests to /v1/responses, and what equal ones have in common."""

from __future__ import annotations

import json
from typing import Any

import httpx2

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def call(url: str, method: str = "POST", path: str = "", key: str = "one", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    sent: dict[str, Any] = (
        {"json": {"model": "alias", "input": "hi"} | body} if method == "POST" else {}
    )
    return httpx2.request(method, url + PATH + path, headers=headers, **sent)


def post(url: str, **body: Any) -> dict[str, Any]:
    response = call(url, **body)
    assert response.status_code == 200, response.text
    return response.json()


def read_events(text: str) -> list[dict[str, Any]]:
    events = []
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream(url: str, **body: Any) -> list[dict[str, Any]]:
    response = call(url, stream=True, **body)
    assert response.headers["content-type"] == "text/event-stream", response.text
    return read_events(response.text)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a response that equal requests have in common."""
    output = [{k: v for k, v in item.items() if "id" not in k} for item in response["output"]]
    return response | {"output": output, "id": "", "created_at": 0, "completed_at": 0}
