"""Requests of tests for Anthropic's messages."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2

from tests.message_events import read_events

HI: Any = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "alias", "max_tokens": 200, "messages": HI}
TOOLS: Any = [{"name": "f", "description": "F.", "input_schema": {"type": "object"}}]


def ask(client: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    return client.messages.create(**(BODY | more))


def stream(url: str, **more: Any) -> list[dict[str, Any]]:
    response = httpx2.post(f"{url}/v1/messages", json=BODY | {"stream": True} | more)
    assert response.headers["content-type"] == "text/event-stream", response.text
    return read_events(response.text)
