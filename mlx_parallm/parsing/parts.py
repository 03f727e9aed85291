"""The parts of an assistant's turn, and the Protocol of its parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of reasoning, without markers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """The next piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call begins; calls of one turn are numbered from 0.

    ``id`` is the id that the model wrote; None if it wrote none.
    """

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; joined, the pieces are the text of a JSON object."""

    index: int
    text: str


Part = ReasoningText | ContentText | ToolCallBegin | ToolCallArguments


class TurnParser(Protocol):
    """Finds the parts of one sample's text while it arrives.

    No text is an error and none is lost: text that only looked like a tool call becomes content.
    """

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        ...

    def add(self, text: str) -> list[Part]:
        """Return the parts that are certain once ``text`` has arrived."""
        ...

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """End the text and return the parts that were held back.

        ``is_cut``: the text ended at a limit or a caller's stop string, not by the model.
        """
        ...
