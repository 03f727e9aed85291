"""From a turn's parts to Anthropic's content blocks, and to the events that build them."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from mlx_parallm.api.turns.arguments import arguments_object
from mlx_parallm.api.turns.stream import ToolCallEnd, TurnPart
from mlx_parallm.parsing.parts import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)

OPENAI_ID = "call_"
ANTHROPIC_ID = "toolu_"


class ContentBlocks:
    """The blocks of one answer, in the order in which the model writes them.

    A block begins with the first text in it that is not white space: clients may not send blocks of
    nothing else back. White space alone between other blocks is left out.

    Attributes:
        blocks: those that have begun; the last may still grow.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._open: str | None = None
        # The thinking of the open block, or the text of its input.
        self._text = ""
        # White space that no block has taken, and the type of the block it would begin.
        self._held, self._held_for = "", ""
        self.blocks: list[dict[str, Any]] = []

    def add(self, part: TurnPart) -> list[dict[str, Any]]:
        """Take in a part; return its events."""
        match part:
            case ReasoningText("") | ContentText("") | ToolCallArguments(_, ""):
                return []
            case ReasoningText(text):
                return self._add_text("thinking", text)
            case ContentText(text):
                return self._add_text("text", text)
            case ToolCallBegin(_, name, id_):
                id_ = (id_ or "").replace(OPENAI_ID, ANTHROPIC_ID, 1)
                block: dict[str, Any] = {"type": "tool_use", "id": id_, "name": name, "input": {}}
                return [*self._close(), self._begin(block)]
            case ToolCallArguments(_, text):
                self._text += text
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case ToolCallEnd():
                return self._close()

    def end(self) -> list[dict[str, Any]]:
        """End the answer; return its last events."""
        events: list[dict[str, Any]] = []
        if self._held and not self.blocks:
            # All that the model wrote.
            events += self._write(self._held_for, self._held)
        return [*events, *self._close()]

    def _add_text(self, type_: str, text: str) -> list[dict[str, Any]]:
        if self._open == type_:
            return self._write(type_, text)
        if self._held_for != type_:
            self._held, self._held_for = "", type_
        self._held += text
        return self._write(type_, self._held) if self._held.strip() else []

    def _write(self, type_: str, text: str) -> list[dict[str, Any]]:
        """Add text to the open block, or to a new one."""
        events: list[dict[str, Any]] = []
        if self._open != type_:
            signed = {"signature": ""} if type_ == "thinking" else {}
            events += [*self._close(), self._begin({"type": type_, type_: ""} | signed)]
        self._text += text
        if type_ == "thinking" and not self._shows_thinking:
            return events
        self.blocks[-1][type_] += text
        return [*events, self._delta({"type": f"{type_}_delta", type_: text})]

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self._open, self._text, self._held = block["type"], "", ""
        self.blocks.append(block)
        # A copy: the block grows before the event is written.
        return {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(block),
        }

    def _close(self) -> list[dict[str, Any]]:
        opened, self._open, self._held = self._open, None, ""
        if opened is None:
            return []
        events: list[dict[str, Any]] = []
        if opened == "thinking":
            self.blocks[-1]["signature"] = signature = signature_of(self._text)
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        elif opened == "tool_use":
            self.blocks[-1]["input"] = arguments_object(self._text)
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def signature_of(thinking: str) -> str:
    """Return what clients want beside thinking and send back unread; nothing checks it here."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()
