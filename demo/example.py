"""One generated conversation with its right answer, and the split into training and evaluation."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Message = dict[str, Any]
"""A chat message in OpenAI's form."""
Tool = dict[str, Any]
"""A tool in OpenAI's form: ``{"type": "function", "function": {...}}``."""
Check = Literal["exact", "number", "json", "calls", "contains"]
Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN = 20
TABLE = "table:"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and its arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and the assistant's right answer.

    Attributes:
        task: the task's name, under which accuracy is reported.
        key: identifies the problem (not its wording); decides the split. Problems whose key
            starts with ``TABLE`` are facts to know by heart and always belong to training.
        messages: the conversation up to the turn to be answered.
        answer: the answer's text; empty when the answer is a tool call.
        steps: the text between ``<think>`` and ``</think>`` if the assistant may think.
        tools: the tools on offer.
        calls: the calls the answer consists of.
        check: the check of an answer.
        expected: texts that an answer must contain, for the check "contains".
    """

    task: str
    key: str
    messages: tuple[Message, ...]
    answer: str = ""
    steps: str = ""
    tools: tuple[Tool, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    check: Check = "exact"
    expected: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """The assistant's turn without thinking, as it is to be generated."""
        return "\n".join(map(call_text, self.calls)) if self.calls else self.answer


Generator = Callable[[Random], Example]


def call_text(call: ToolCall) -> str:
    """Return a tool call as the chat template writes it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'


def user(text: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """Return an assistant's message."""
    return {"role": "assistant", "content": text}


def split_of(example: Example) -> Split:
    """Return the split a problem belongs to, by the hash of its key: one in twenty is held out."""
    if example.key.startswith(TABLE):
        return "train"
    digest = zlib.crc32(f"{example.task}|{example.key}".encode())
    return "held_out" if digest % HELD_OUT_ONE_IN == 0 else "train"


def draw(generate: Generator, rng: Random, split: Split) -> Example:
    """Return the first drawn example that belongs to ``split``."""
    while True:
        example = generate(rng)
        if split_of(example) == split:
            return example
