"""Descriptions of how families of models write tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.parsing.reader import Reader, Steps
from mlx_parallm.parsing.writer import TurnWriter

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
