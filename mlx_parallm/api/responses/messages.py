"""From items to the messages of a conversation, as chat templates take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mlx_parallm.api.responses.items import IMAGE, SUMMARY_SEAL, Item, unsealed
from mlx_parallm.api.responses.tools import flat_name
from mlx_parallm.api.turns.history import SUMMARY
from mlx_parallm.api.turns.images import Detail, ImageSource, image_part

Message = dict[str, Any]
NO_PLACES: Mapping[str, str] = MappingProxyType({})


def item_messages(
    items: Iterable[Item],
    instructions: str | None = None,
    places: Mapping[str, str] = NO_PLACES,
) -> list[Message]:
    """Return the messages that items make, with the instructions before them.

    Reasoning, text and calls that follow each other are one message of the assistant. System
    messages at the beginning are one: many templates take one only, and only there.

    Args:
        items: as ``input_items`` makes them, or of an answer's output.
        instructions: the first system message.
        places: the place in the body of each image, by its URL; others are of earlier responses.
    """
    conversation = _Conversation(places)
    if instructions:
        conversation.add_system(instructions)
    for item in items:
        conversation.add(item)
    return conversation.messages


class _Conversation:
    """Messages to which items are added."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self.messages: list[Message] = []
        self._places = places
        self._names: dict[str, str] = {}

    def add(self, item: Item) -> None:
        """Append an item."""
        match item["type"]:
            case "message":
                self._add_message(item)
            case "reasoning":
                self._add_reasoning(_reasoning_text(item))
            case "function_call":
                function = {"name": _called(item), "arguments": item["arguments"]}
                self._add_call(item, {"type": "function", "function": function})
            case "compaction":
                summary = unsealed(item["encrypted_content"], SUMMARY_SEAL)
                self.messages.append({"role": "user", "content": f"{SUMMARY}\n\n{summary}"})
            case "compaction_trigger":
                pass
            case "custom_tool_call":
                custom = {"name": _called(item), "input": item["input"]}
                self._add_call(item, {"type": "custom", "custom": custom})
            case _:
                self._add_output(item)

    def add_system(self, text: str) -> None:
        """Append to the system message at the beginning, or a system message of its own."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def _add_message(self, item: Item) -> None:
        role, content = item["role"], item["content"]
        if role in ("system", "developer"):
            self.add_system(_content_text(content))
        elif role == "user":
            self.messages.append({"role": "user", "content": self._parts(content)})
        else:
            self._assistant(("content", "tool_calls"))["content"] = _content_text(content)

    def _add_reasoning(self, text: str) -> None:
        if text:
            message = self._assistant(("content", "tool_calls"))
            before = message.get("reasoning_content")
            message["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def _add_call(self, item: Item, call: dict[str, Any]) -> None:
        self._names[item["call_id"]] = _called(item)
        message = self._assistant(())
        message.setdefault("tool_calls", []).append({"id": item["call_id"], **call})

    def _add_output(self, item: Item) -> None:
        output = item["output"]
        message = {
            "role": "tool",
            "tool_call_id": item["call_id"],
            "content": output if isinstance(output, str) else self._parts(output),
        }
        # Some templates write the tool's name with the result.
        if item["call_id"] in self._names:
            message["name"] = self._names[item["call_id"]]
        self.messages.append(message)

    def _parts(self, parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """Return a text; parts if there are images."""
        if not any(part["type"] == IMAGE for part in parts):
            return _content_text(parts)
        return [
            self._image(part)
            if part["type"] == IMAGE
            else {"type": "text", "text": _content_text([part])}
            for part in parts
        ]

    def _image(self, part: dict[str, Any]) -> dict[str, Any]:
        url, detail = part["image_url"], Detail(part["detail"])
        param = self._places.get(url, "previous_response_id")
        return image_part(ImageSource(param=param, url=url, detail=detail))

    def _assistant(self, full: tuple[str, ...]) -> Message:
        """Return the assistant's last message, or a new one if it has one of ``full`` already."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] == "assistant" and not any(last.get(key) for key in full):
            return last
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _called(item: Item) -> str:
    return flat_name(item["name"], item.get("namespace"))


def _content_text(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


def _reasoning_text(item: Item) -> str:
    """Return all of the reasoning where it is known, else its summary."""
    if item["content"]:
        return _content_text(item["content"])
    whole = unsealed(item.get("encrypted_content") or "")
    return whole or "\n\n".join(part["text"] for part in item["summary"])
