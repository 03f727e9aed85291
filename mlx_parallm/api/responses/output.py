"""From a turn's parts to items of a response's output, and their events.

Events are OpenAI's (openai/types/responses/response_stream_event.py of its Python SDK), without
their sequence numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from mlx_parallm.api.responses.items import SUMMARY_SEAL, Item, new_id, sealed
from mlx_parallm.api.turns.stream import CustomInput, TurnPart
from mlx_parallm.parsing.parts import ContentText, ReasoningText, ToolCallArguments, ToolCallBegin
from mlx_parallm.types.errors import ParallmError

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]

IN_PROGRESS = "in_progress"
COMPLETED = "completed"
INCOMPLETE = "incomplete"


class OutputItem(ABC):
    """An item of the output that grows, and its events."""

    type: ClassVar[str]

    def __init__(self) -> None:
        self.id = new_id(self.type)
        self._text: str = ""

    def body(self, status: str) -> Item:
        """Return the item with what it has so far."""
        return {"id": self.id, "type": self.type, "status": status} | self._fields(status)

    def opening(self) -> list[Event]:
        """Return what follows ``response.output_item.added``."""
        return []

    @abstractmethod
    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Take in more text, with the log-probabilities of its tokens if they are wanted."""

    @abstractmethod
    def closing(self) -> list[Event]:
        """Return what precedes ``response.output_item.done``."""

    @abstractmethod
    def _fields(self, status: str) -> Item: ...


class TextItem(OutputItem):
    """An item of one part, which is a text; while it has no text, it has no part."""

    event: ClassVar[str]

    def opening(self) -> list[Event]:
        """Return the beginning of the part."""
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Append a text."""
        self._text += text
        return [{"type": f"{self.event}.delta", "content_index": 0, "delta": text}]

    def closing(self) -> list[Event]:
        """Return the end of the text and of the part."""
        part = self._part()
        return [
            {"type": f"{self.event}.done", "content_index": 0, "text": self._text},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def _content(self, status: str) -> list[Item]:
        return [] if status == IN_PROGRESS and not self._text else [self._part()]

    @abstractmethod
    def _part(self) -> Item: ...


class Message(TextItem):
    """Text that the assistant says."""

    type = "message"
    event = "response.output_text"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: Logprobs = []

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Append a text, and the log-probabilities of its tokens."""
        self._logprobs += logprobs
        (delta,) = super().add(text, logprobs)
        return [delta | {"logprobs": logprobs}]

    def closing(self) -> list[Event]:
        """Return the end of the text, with all log-probabilities, and of the part."""
        text_done, part_done = super().closing()
        return [text_done | {"logprobs": part_done["part"]["logprobs"]}, part_done]

    def _fields(self, status: str) -> Item:
        return {"role": "assistant", "content": self._content(status)}

    def _part(self) -> Item:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }


class Reasoning(TextItem):
    """Thoughts of the model."""

    type = "reasoning"
    event = "response.reasoning_text"

    def __init__(self, *, has_summary: bool, is_sealed: bool) -> None:
        super().__init__()
        self._has_summary = has_summary
        self._is_sealed = is_sealed

    def closing(self) -> list[Event]:
        """Return the end of the text, and the summary, which is the whole reasoning."""
        events = super().closing()
        if not self._has_summary:
            return events
        head = "response.reasoning_summary"
        empty = self._summary() | {"text": ""}
        return [
            *events,
            {"type": f"{head}_part.added", "summary_index": 0, "part": empty},
            {"type": f"{head}_text.delta", "summary_index": 0, "delta": self._text},
            {"type": f"{head}_text.done", "summary_index": 0, "text": self._text},
            {"type": f"{head}_part.done", "summary_index": 0, "part": self._summary()},
        ]

    def _fields(self, status: str) -> Item:
        has_summary = self._has_summary and status != IN_PROGRESS
        summary = [self._summary()] if has_summary else []
        fields: Item = {"summary": summary, "content": self._content(status)}
        return fields | ({"encrypted_content": sealed(self._text)} if self._is_sealed else {})

    def _part(self) -> Item:
        return {"type": "reasoning_text", "text": self._text}

    def _summary(self) -> Item:
        return {"type": "summary_text", "text": self._text}


class CallItem(OutputItem):
    """A call of a tool; ``names`` are the keys that identify the tool."""

    def __init__(self, call_id: str, names: Mapping[str, str]) -> None:
        super().__init__()
        self._head = {"call_id": call_id, **names}


class FunctionCall(CallItem):
    """A call of a function; its text is the arguments."""

    type = "function_call"

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Append a piece of the arguments."""
        self._text += text
        return [{"type": "response.function_call_arguments.delta", "delta": text}]

    def closing(self) -> list[Event]:
        """Return the end of the arguments."""
        done = {"arguments": self._text, "name": self._head["name"]}
        return [{"type": "response.function_call_arguments.done", **done}]

    def _fields(self, status: str) -> Item:
        return {"arguments": self._text} | self._head


class CustomCall(CallItem):
    """A call of a custom tool, whose input stands within the arguments."""

    type = "custom_tool_call"

    def __init__(self, call_id: str, names: Mapping[str, str]) -> None:
        super().__init__(call_id, names)
        self._input = CustomInput()

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Append a piece of the arguments."""
        return self._delta(self._input.add(text))

    def closing(self) -> list[Event]:
        """Return the rest of the input, and its end."""
        rest = self._delta(self._input.end())
        done = {"type": "response.custom_tool_call_input.done", "input": self._input.text}
        return [*rest, done]

    def _fields(self, status: str) -> Item:
        return {"input": self._input.text} | self._head

    def _delta(self, text: str) -> list[Event]:
        event = {"type": "response.custom_tool_call_input.delta", "delta": text}
        return [event] if text else []


class Summary(OutputItem):
    """A summary of a conversation, which is shown once it is whole."""

    type = "compaction"

    def body(self, status: str) -> Item:
        """Return the item; it has no status."""
        return {"id": self.id, "type": self.type} | self._fields(status)

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Append a text."""
        self._text += text
        return []

    def closing(self) -> list[Event]:
        """Return nothing: OpenAI has no such event."""
        return []

    def _fields(self, status: str) -> Item:
        del status
        return {"encrypted_content": sealed(self._text, SUMMARY_SEAL)}


class OutputWriter:
    """Writes items one after the other.

    Args:
        names: by the name that the model knows a tool by, the keys that identify it in a call.
        custom: the names of those that are custom tools.
        has_summary: whether reasoning has a summary.
        is_sealed: whether reasoning has ``encrypted_content``.
    """

    def __init__(
        self,
        *,
        names: Mapping[str, Mapping[str, str]],
        custom: frozenset[str],
        has_summary: bool,
        is_sealed: bool,
    ) -> None:
        self._names = names
        self._custom = custom
        self._has_summary = has_summary
        self._is_sealed = is_sealed
        self._done: list[Item] = []
        self._open: OutputItem | None = None
        self._space = ""
        self._space_logprobs: Logprobs = []

    def items(self, status: str = IN_PROGRESS) -> list[Item]:
        """Return all items so far; ``status`` is that of one that is not complete."""
        return [*self._done] if self._open is None else [*self._done, self._open.body(status)]

    def add(self, parts: Sequence[TurnPart], logprobs: Sequence[Logprobs]) -> list[Event]:
        """Return the events of more parts; ``logprobs`` are those of each."""
        return [
            event
            for part, own in zip(parts, logprobs, strict=True)
            for event in self._add(part, own)
        ]

    def close(self, status: str) -> list[Event]:
        """End the output, and return the events; without an item it becomes an empty message."""
        events = []
        if self._space or not (self._done or self._open):
            events = self._say(self._space, self._space_logprobs)
            self._space, self._space_logprobs = "", []
        return events + self._close(status)

    def _add(self, part: TurnPart, logprobs: Logprobs) -> list[Event]:
        if isinstance(part, ContentText):
            return self._content(part.text, logprobs)
        if isinstance(part, ReasoningText):
            return self._think(part.text)
        if isinstance(part, ToolCallBegin):
            return self._begin_call(part)
        if isinstance(part, ToolCallArguments):
            assert self._open is not None, "arguments follow the beginning of their call"
            return self._placed(self._open.add(part.text, []))
        return self._close(INCOMPLETE if part.is_cut else COMPLETED)

    def _content(self, text: str, logprobs: Logprobs) -> list[Event]:
        """White space alone waits: before a call it is no message."""
        if isinstance(self._open, Message):
            return self._placed(self._open.add(text, logprobs))
        self._space += text
        self._space_logprobs += logprobs
        if self._space.isspace() or not self._space:
            return []
        text, logprobs = self._space, self._space_logprobs
        self._space, self._space_logprobs = "", []
        return self._say(text, logprobs)

    def _say(self, text: str, logprobs: Logprobs) -> list[Event]:
        message = Message()
        opening = self._begin(message)
        return opening + (self._placed(message.add(text, logprobs)) if text else [])

    def _think(self, text: str) -> list[Event]:
        item, opening = self._open, list[Event]()
        if not isinstance(item, Reasoning):
            item = Reasoning(has_summary=self._has_summary, is_sealed=self._is_sealed)
            opening = self._begin(item)
        return opening + self._placed(item.add(text, []))

    def _begin_call(self, part: ToolCallBegin) -> list[Event]:
        self._space, self._space_logprobs = "", []
        kind = CustomCall if part.name in self._custom else FunctionCall
        return self._begin(kind(part.id or "", self._names.get(part.name, {"name": part.name})))

    def _begin(self, item: OutputItem) -> list[Event]:
        ended = self._close(COMPLETED)
        added: Event = {
            "type": "response.output_item.added",
            "output_index": len(self._done),
            "item": item.body(IN_PROGRESS),
        }
        self._open = item
        return [*ended, added, *self._placed(item.opening())]

    def _close(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        events = self._placed(item.closing())
        body = item.body(status)
        done = {"type": "response.output_item.done", "output_index": len(self._done), "item": body}
        self._done.append(body)
        self._open = None
        return [*events, done]

    def _placed(self, events: Sequence[Event]) -> list[Event]:
        """Return the events with the place of the open item."""
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": len(self._done)}
        return [{"type": event["type"], **place, **event} for event in events]


class SummaryWriter(OutputWriter):
    """Writes one item: a summary, which is what the model says, or thinks if it says nothing."""

    def __init__(self) -> None:
        super().__init__(names={}, custom=frozenset(), has_summary=False, is_sealed=False)
        self._said = self._thought = ""

    @property
    def summary(self) -> str:
        """The summary so far."""
        return self._said.strip() or self._thought.strip()

    @override
    def close(self, status: str) -> list[Event]:
        if not self.summary:
            raise ParallmError("The model wrote no summary.")
        item = Summary()
        item.add(self.summary, [])
        return self._begin(item) + self._close(status)

    @override
    def _add(self, part: TurnPart, logprobs: Logprobs) -> list[Event]:
        if isinstance(part, ContentText):
            self._said += part.text
        elif isinstance(part, ReasoningText):
            self._thought += part.text
        return []
