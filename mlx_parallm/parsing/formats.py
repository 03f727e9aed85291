"""Formats of tool calls and reasoning by family of models, and the writer of such turns."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mlx_parallm.parsing.parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from mlx_parallm.parsing.reader import Reader, Steps


class TurnWriter:
    """Collects parts in order; writing one makes everything read so far final.

    White space next to a marker of reasoning or of a tool call belongs to no part.

    Attributes:
        is_reasoning: True if the text so far ends inside the reasoning.
        calls: how many calls have begun.
        call_is_open: True if the last of them has not ended.
        awaits_end: True if end markers of calls may still come.
        broken: the calls whose rest is missing, or is something else.
    """

    def __init__(self, reader: Reader) -> None:
        self.is_reasoning = False
        self.calls = 0
        self.call_is_open = False
        self.awaits_end = False
        self.broken: set[int] = set()
        self._is_without_arguments = False
        self._seen: set[type[Part]] = set()
        self._ids: set[str] = set()
        self._reader = reader
        self._parts: list[Part] = []
        self._space = ""
        self._strips = False

    @property
    def has_content(self) -> bool:
        """True if there is content other than white space."""
        return ContentText in self._seen

    def fork(self, reader: Reader) -> TurnWriter:
        """Return a writer that goes on with this one's numbers and ids of calls."""
        forked = TurnWriter(reader)
        forked.calls = self.calls
        forked._ids = set(self._ids)
        return forked

    def join(self, forked: TurnWriter) -> None:
        """Add the parts of such a writer, and end the reasoning."""
        self.marker()
        self.is_reasoning = False
        for part in forked.take():
            self._append(part)
        self.calls = forked.calls
        self.awaits_end = forked.awaits_end
        self._ids = forked._ids

    @property
    def parts(self) -> list[Part]:
        """The parts collected since the last ``take``."""
        return self._parts

    def take(self) -> list[Part]:
        """Return the parts collected since the last call."""
        parts, self._parts = self._parts, []
        return merge(parts) if len(parts) > 1 else parts

    def content(self, text: str) -> None:
        """Add a piece of content."""
        self._reader.keep()
        text = self._without_outer_space(text)
        if text:
            self._append(ContentText(text))

    def reasoning(self, text: str) -> None:
        """Add a piece of reasoning."""
        self._reader.keep()
        text = self._without_outer_space(text)
        if text:
            self._append(ReasoningText(text))

    def marker(self) -> None:
        """Drop a marker that was read, and the white space around it."""
        self._reader.keep()
        self._space = ""
        self._strips = True

    def next_message(self, kind: type[ContentText] | type[ReasoningText]) -> None:
        """Begin a new message; a newline separates it from an earlier one of its kind."""
        self.marker()
        if kind in self._seen:
            self._space = "\n"

    def finish(self) -> None:
        """Add white space that was held back at the end of the text."""
        if self._space and not self._strips and not self.is_reasoning:
            self._append(ContentText(self._space))
        self._space = ""

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a tool call; an id that an earlier call has is ignored."""
        self.marker()
        if call_id in self._ids:
            call_id = None
        # A name from JSON may contain a lone surrogate, which UTF-8 cannot encode.
        name = name.encode(errors="replace").decode()
        self._append(ToolCallBegin(self.calls, name, call_id))
        self._ids.update([call_id] if call_id else [])
        self.calls += 1
        self.call_is_open = self.awaits_end = self._is_without_arguments = True

    def end_call(self, *, is_broken: bool = False) -> None:
        """End the current call; without arguments they are ``{}``, unless the text was cut.

        ``is_broken``: its rest is missing, or is something else.
        """
        if self._is_without_arguments and self.call_is_open and not self._reader.is_cut:
            self.arguments("{}")
        self.marker()
        self.call_is_open = False
        if is_broken:
            self.broken.add(self.calls - 1)

    def end_section(self) -> None:
        """Drop the last of the markers that end calls."""
        self.marker()
        self.awaits_end = False

    def arguments(self, text: str) -> None:
        """Add a piece of the current call's arguments."""
        self._reader.keep()
        if text:
            self._is_without_arguments = False
            self._append(ToolCallArguments(self.calls - 1, text))

    def _append(self, part: Part) -> None:
        self._seen.add(type(part))
        self._parts.append(part)

    def _without_outer_space(self, text: str) -> str:
        if self._strips:
            text = text.lstrip()
            if not text:
                return ""
            self._strips = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown


def merge(parts: list[Part]) -> list[Part]:
    """Return the parts with neighbours of the same kind joined."""
    merged: list[Part] = []
    for _, group in groupby(parts, _kind):
        first, *rest = group
        if isinstance(first, ToolCallBegin):
            merged += [first, *rest]
        else:
            texts = [part.text for part in rest if not isinstance(part, ToolCallBegin)]
            merged.append(replace(first, text="".join([first.text, *texts])))
    return merged


def _kind(part: Part) -> tuple[type[Part], int]:
    """Return what neighbours that are joined have in common: their kind, and a call's number."""
    return type(part), part.index if isinstance(part, (ToolCallBegin, ToolCallArguments)) else 0


JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called.

    Attributes:
        name: its name in calls.
        parameters: the JSON schema of its arguments.
        strict: True: a schema that a forced call cannot honour in full is an error; False:
            unsupported parts of the schema are ignored.
    """

    name: str
    parameters: JsonSchema
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ReadContext:
    """The input and output of a format's parser, and the facts of the request that it needs.

    Attributes:
        reader: gives the text.
        writer: collects the parts.
        tools: the request's tools.
        is_open: True if the prompt ends inside the reasoning.
        reads_calls: True if calls become tool calls; False: a whole-turn format writes them as
            content.
        reads_reasoning: True if reasoning is separated; False: a whole-turn format writes it as
            content.
        is_forced: True if a grammar forces the turn to be calls, so that markup that is cut off
            is no content.
        silent: markers to be dropped where they enclose content.
    """

    reader: Reader
    writer: TurnWriter
    tools: tuple[Tool, ...]
    is_open: bool = False
    reads_calls: bool = True
    reads_reasoning: bool = True
    is_forced: bool = False
    silent: tuple[str, ...] = ()

    def tool(self, name: str) -> Tool | None:
        """Return the tool of that name; None if the request has none."""
        return next((tool for tool in self.tools if tool.name == name), None)


Detect = Callable[[str, Container[str]], bool]
CallReader = Callable[[ReadContext], Steps[None]]


@dataclass(frozen=True, slots=True)
class CallText:
    """The text of tool calls that a grammar forces.

    Attributes:
        call: one call; ``$name`` stands for the tool's name, ``$arguments`` for the JSON object.
        separator: text between calls; None: a turn has at most one call.
        begin: text before all calls.
        end: text after all calls.
    """

    call: str
    separator: str | None = "\n"
    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Notation of tool calls by a family of models.

    Attributes:
        name: its name on the command line, as in vLLM's ``--tool-call-parser``.
        summary: an example of a call, in one line.
        call: parses a start marker and the calls after it.
        markers: texts that may be special tokens and must not be hidden from ``call``.
        detect: True for the text of a chat template and the vocabulary of this family.
        forced: the text of forced calls; None: they are a plain JSON array.
        stop_texts: texts after which the model waits for the tools' results.
        starts: the markers that begin calls, in text after the reasoning.
        ends: the markers that end calls, inner ones first; a broken call may leave some behind.
        bare: parses calls without a marker at the beginning of the text; None: there are none.
        bare_starts: the characters that such calls begin with.
        silent: further markers, of neither calls nor reasoning; they are dropped from the text.
        is_harmony: True for OpenAI's Harmony, which mixes reasoning and calls.
        read_turn: parses the whole turn, if reasoning may stand between calls; None: reasoning
            comes before all calls.
        id_length: length of the alphanumeric ids that its templates accept; None: any id.
    """

    name: str
    summary: str
    call: CallReader
    markers: tuple[str, ...]
    detect: Detect
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: CallReader | None = None
    bare_starts: tuple[str, ...] = ()
    forced: CallText | None = None
    stop_texts: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    is_harmony: bool = False
    read_turn: Callable[[ReadContext], Steps[None]] | None = None
    id_length: int | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers of reasoning of a family of models.

    Attributes:
        name: its name on the command line, as in vLLM's ``--reasoning-parser``.
        start: the marker that begins it.
        end: the marker that ends it.
        detect: True for the text of a chat template and the vocabulary of this family.
        silent: further markers, outside reasoning; they are dropped from the text.
        also_begins: a marker that begins it too, as some models shorten ``start``.
        answer_start: the marker that begins the answer; None: it follows ``end``.
        more_markers: further texts that must not be hidden from the parser.
        is_harmony: True for OpenAI's Harmony, whose channels may come anywhere.
        read_turn: parses the whole turn, if reasoning may stand anywhere; None: reasoning comes
            at the beginning.
    """

    name: str
    start: str
    end: str
    detect: Detect
    silent: tuple[str, ...] = ()
    answer_start: str | None = None
    also_begins: str | None = None
    more_markers: tuple[str, ...] = ()
    is_harmony: bool = False
    read_turn: Callable[[ReadContext], Steps[None]] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return (self.start, self.end, *self.more_markers)

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts that a turn begins with if it begins with reasoning.

        A marker in words follows a space where the prompt ends with a word.
        """
        return (self.start, f" {self.start}") if self.start[0].isalpha() else (self.start,)

    def is_open_after(self, prompt: str, begun: str = "") -> bool:
        """True if the rendered prompt ends inside the reasoning.

        ``begun`` is the part of the answer that the prompt contains, if any.
        """
        return prompt.rstrip().endswith(self.start) or begun.rfind(self.start) > begun.rfind(
            self.end
        )


def tools_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return the functions among tools of the chat API or the Responses API.

    A tool without ``parameters`` takes an empty object.
    """
    functions = (tool.get("function", tool) for tool in tools)
    empty: JsonSchema = {"type": "object", "properties": {}, "additionalProperties": False}
    return tuple(
        Tool(
            function["name"],
            function.get("parameters") or empty,
            strict=function.get("strict") is True,
        )
        for function in functions
        if isinstance(function.get("name"), str)
    )
