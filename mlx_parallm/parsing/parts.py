"""What the text of an assistant's turn consists of, and who finds it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of what the model thinks; markers are not in it."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """The next piece of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call begins; calls of one turn are numbered from 0.

    ``id`` is one that the model wrote itself, None where it did not.
    """

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; all of them together are the text of a JSON object."""

    index: int
    text: str


Part = ReasoningText | ContentText | ToolCallBegin | ToolCallArguments


class TurnParser(Protocol):
    """Finds the parts of one sample's text while it streams by.

    Whatever the text is, it is never an error and nothing of it is lost: what looked like a tool
    call and is none comes back as content.
    """

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        ...

    def add(self, text: str) -> list[Part]:
        """The parts that the next text makes certain."""
        ...

    def flush(self) -> list[Part]:
        """What was still held back; the end of the text."""
        ...
