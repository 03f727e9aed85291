"""Reads a stream of Anthropic's events strictly: their order, and what they add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

# DELTAS: type of block and key that each type of delta adds to.
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
FRESH: Mapping[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the payloads of a whole stream; each event's name is its payload's type."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    payloads = []
    for part in parts:
        name, data = part.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        payloads.append(payload)
    return payloads


def fold_message(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the message that a complete stream without pings adds up to."""
    first, *middle, delta, stop = events
    assert first["type"] == "message_start"
    assert (delta["type"], stop) == ("message_delta", {"type": "message_stop"})
    message = dict(first["message"])
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == (
        [],
        None,
        None,
    )
    message |= {"content": fold_blocks(middle)} | delta["delta"]
    return message | {"usage": message["usage"] | delta["usage"]}


def fold_blocks(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks that events add up to, one after the other; inputs of tools stay texts."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            blocks.append(dict(event["content_block"]))
            kind = blocks[-1]["type"]
            assert FRESH[kind].items() <= blocks[-1].items()
            if kind == "tool_use":
                blocks[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            assert is_open
            _add_delta(blocks[-1], event["delta"])
        else:
            assert event["type"] == "content_block_stop"
            assert is_open
            is_open = False
        assert event["index"] == len(blocks) - 1
    assert not is_open
    return blocks


def _add_delta(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    kind, key = DELTAS[delta["type"]]
    assert block["type"] == kind
    assert not block.get("signature"), "the signature is the last delta of a block"
    into = "input" if key == "partial_json" else key
    assert delta[key]
    block[into] += delta[key]


def input_tokens_of(usage: Any) -> int:
    """Return the tokens of a prompt: Anthropic's counts divide them into three."""
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached
