"""A small state machine that checks the order of a response's events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]

KEYS = frozenset(
    """
    id object created_at completed_at status incomplete_details model previous_response_id
    instructions output error tools tool_choice truncation parallel_tool_calls text top_p
    presence_penalty frequency_penalty top_logprobs temperature reasoning usage
    max_output_tokens max_tool_calls store background service_tier metadata safety_identifier
    prompt_cache_key
    """.split()  # noqa: SIM905 - as a list it is a page long
)
# TEXTS of each type of item: the name of their events, and the key that ends them.
TEXTS = {
    "message": [("response.output_text", "text")],
    "reasoning": [("response.reasoning_text", "text"), ("response.reasoning_summary_text", "text")],
    "function_call": [("response.function_call_arguments", "arguments")],
    "custom_tool_call": [("response.custom_tool_call_input", "input")],
}
LAST = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


def check_response(response: dict[str, Any]) -> None:
    """Every key is there; items fit the status."""
    assert response.keys() >= KEYS
    assert response["object"] == "response"
    assert response["id"].startswith("resp_")
    if response["status"] == "completed":
        assert all(item["status"] == "completed" for item in response["output"])
        assert response["completed_at"] >= response["created_at"]
    else:
        assert response["completed_at"] is None
    has_reason = response["incomplete_details"] is not None
    assert has_reason == (response["status"] == "incomplete")
    assert (response["error"] is not None) == (response["status"] == "failed")


def check_events(events: Iterable[Event]) -> dict[str, Any]:
    """Raise AssertionError at the first event that may not come here; the last response."""
    order = _Order()
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        order.take(event)
    assert order.last is not None, "the stream has no end"
    return order.last


class _Order:
    """The state of the check: which events may come next."""

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self._stage = "start"
        self._items: list[dict[str, Any]] = []
        self._item: _OpenItem | None = None

    def take(self, event: Event) -> None:
        assert self.last is None, f"{event['type']} after the end"
        kind = event["type"]
        if kind in ("response.created", "response.queued", "response.in_progress"):
            self._begin(kind, event["response"])
        elif kind == "error":
            assert self._stage != "failing"
            assert event.keys() == {"type", "sequence_number", "code", "message", "param"}
            self._stage = "failing"
        elif kind in LAST.values():
            self._end(kind, event["response"])
        else:
            assert self._stage == "in_progress", f"{kind} in {self._stage}"
            self._of_item(kind, event)

    def _begin(self, kind: str, response: dict[str, Any]) -> None:
        check_response(response)
        before = {"response.created": "start", "response.queued": "created"}
        allowed = before.get(kind, "created queued")
        assert self._stage in allowed, f"{kind} in {self._stage}"
        assert response["output"] == []
        assert response["usage"] is None
        self._stage = kind.removeprefix("response.")

    def _end(self, kind: str, response: dict[str, Any]) -> None:
        check_response(response)
        assert kind == LAST[response["status"]]
        if kind == "response.failed":
            assert self._stage == "failing"
            assert response["output"][: len(self._items)] == self._items
        else:
            assert self._stage == "in_progress"
            assert self._item is None, "an item is open"
            assert response["output"] == self._items
        self.last = response

    def _of_item(self, kind: str, event: Event) -> None:
        assert event["output_index"] == len(self._items)
        if kind == "response.output_item.added":
            assert self._item is None, "two items are open"
            self._item = _OpenItem(event["item"])
            return
        assert self._item is not None, f"{kind} without an item"
        if kind == "response.output_item.done":
            self._item.check_done(event["item"])
            self._items.append(event["item"])
            self._item = None
        else:
            self._item.take(kind, event)


class _OpenItem:
    """An item between its first and last event."""

    def __init__(self, item: dict[str, Any]) -> None:
        assert item["status"] == "in_progress"
        assert not any(item.get(key) for key in ("content", "arguments", "input"))
        self._item = item
        self._texts = {name: "" for name, _ in TEXTS[item["type"]]}
        self._done: dict[str, str] = {}
        self._part: dict[str, Any] | None = None
        self._parts: list[dict[str, Any]] = []
        self._summary: list[dict[str, Any]] = []
        self._logprobs: list[Any] = []

    def take(self, kind: str, event: Event) -> None:
        assert event["item_id"] == self._item["id"]
        name, _, step = kind.rpartition(".")
        if name == "response.content_part":
            self._of_part(step, event)
        elif name == "response.reasoning_summary_part":
            if step == "done":
                self._summary.append(event["part"])
        elif step == "delta":
            assert name not in self._done, f"{kind} after its end"
            assert event["delta"], "an empty delta"
            assert name in self._texts
            self._texts[name] += event["delta"]
            self._logprobs += event.get("logprobs", [])
        else:
            assert step == "done"
            key = dict(TEXTS[self._item["type"]])[name]
            assert event[key] == self._texts[name], "the deltas are not the text"
            self._done[name] = event[key]

    def check_done(self, item: dict[str, Any]) -> None:
        assert (item["id"], item["type"]) == (self._item["id"], self._item["type"])
        assert item["status"] in ("completed", "incomplete")
        assert self._part is None, "a part is open"
        if item["type"] in ("message", "reasoning"):
            assert item["content"] == self._parts
            assert len(self._parts) == 1
        if item["type"] == "reasoning":
            assert item["summary"] == self._summary
        if item["type"] == "message":
            assert item["content"][0]["logprobs"] == self._logprobs
        first, key = TEXTS[item["type"]][0]
        shown = item["content"][0]["text"] if "content" in item else item[key]
        assert self._done[first] == shown

    def _of_part(self, step: str, event: Event) -> None:
        assert event["content_index"] == len(self._parts)
        if step == "added":
            assert self._part is None
            assert event["part"]["text"] == ""
            self._part = event["part"]
        else:
            assert self._part is not None
            assert event["part"]["type"] == self._part["type"]
            self._parts.append(event["part"])
            self._part = None
