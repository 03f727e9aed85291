"""One streaming request over a plain connection, to its end or cut off in the middle."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 120.0


class WrongAnswerError(Exception):
    """The server answered with an error, or with another text than it did alone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    text: str
    finish_reason: str | None
    output_tokens: int


def ask(base_url: str, route: str, body: dict[str, Any]) -> Answer:
    """Send a request and follow its stream to the end.

    Raises:
        WrongAnswerError: the status is no 200, an event is an error, or the stream breaks off.
        OSError: the connection failed.
    """
    text, finish_reason, output_tokens, is_done = [], None, 0, False
    for event in _events(base_url, route, body):
        is_done = event is None
        if event is None:
            break
        if "error" in event:
            raise WrongAnswerError(f"error event: {event['error']}")
        for choice in event["choices"]:
            text.append(_text_of(choice))
            finish_reason = choice.get("finish_reason") or finish_reason
        output_tokens = (event.get("usage") or {}).get("completion_tokens", output_tokens)
    if not is_done:
        raise WrongAnswerError("the stream ended without [DONE]")
    return Answer("".join(text), finish_reason, output_tokens)


def ask_and_leave(base_url: str, route: str, body: dict[str, Any], num_events: int) -> int:
    """Send a request, read ``num_events`` events, close the connection; return how many came."""
    seen = 0
    events = _events(base_url, route, body)
    with closing(events):
        for event in events:
            if event is None or seen == num_events:
                break
            seen += 1
    return seen


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("reasoning") or "") + (delta.get("content") or "")


def _events(base_url: str, route: str, body: dict[str, Any]) -> Generator[dict[str, Any] | None]:
    """Yield the events of the stream, None for its end mark; closing it closes the connection."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    with closing(connection):
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", route, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(300).decode(errors="replace")
            raise WrongAnswerError(f"status {response.status}: {text}")
        for line in response:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield None if data == b"[DONE]" else json.loads(data)
