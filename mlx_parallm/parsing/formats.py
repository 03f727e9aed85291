"""What tells one family's way of writing tool calls or reasoning from another's."""

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
        name: what it is called by.
        parameters: the JSON schema of its arguments.
        strict: whether a forced call must honour all of the schema, or only what is supported.
    """

    name: str
    parameters: JsonSchema
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ReadContext:
    """What a format reads from, writes to and may know of the request.

    Attributes:
        reader: the text.
        writer: takes the parts.
        tools: the request's tools.
        is_open: whether the prompt ends inside the reasoning.
        reads_calls: whether calls are wanted as such; a whole-turn format makes content of others.
        reads_reasoning: whether reasoning is wanted as such, likewise.
    """

    reader: Reader
    writer: TurnWriter
    tools: tuple[Tool, ...]
    is_open: bool = False
    reads_calls: bool = True
    reads_reasoning: bool = True

    def tool(self, name: str) -> Tool | None:
        """The tool of that name, None where the request has none."""
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, slots=True)
class CallText:
    """How calls are written where a grammar forces them.

    Attributes:
        call: one call; ``$name`` stands for the tool's name, ``$arguments`` for the JSON object.
        separator: what stands between calls; None: a turn has one call at most.
        begin: what precedes all calls.
        end: what follows all calls.
    """

    call: str
    separator: str | None = "\n"
    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        name: the name it has on the command line, after vLLM's ``--tool-call-parser``.
        summary: what its calls look like, in one line.
        read: reads what follows the reasoning up to the end of the text.
        markers: texts that may be tokens of their own and must not be hidden from ``read``.
        detect: whether a chat template (its text) and a vocabulary are of this family.
        forced: how a forced call is written; None: as a plain JSON array.
        stop_texts: texts after which the model waits for the tools' results.
        silent: further markers, of what is neither a call nor reasoning; they are not shown.
        is_harmony: whether it is OpenAI's Harmony, which mixes reasoning and calls.
        read_turn: reads the reasoning too, where that may stand between calls; None: it is first.
        id_length: letters and digits of the ids that its templates take; None: they take any id.
    """

    name: str
    summary: str
    read: Callable[[ReadContext], Steps[None]]
    markers: tuple[str, ...]
    detect: Callable[[str, Container[str]], bool]
    forced: CallText | None = None
    stop_texts: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    is_harmony: bool = False
    read_turn: Callable[[ReadContext], Steps[None]] | None = None
    id_length: int | None = None

    def keeps_special_tokens(self, special_tokens: Container[str]) -> bool:
        """Whether the text must be detokenised with its special tokens."""
        return any(marker in special_tokens for marker in (*self.markers, *self.silent))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks what it thinks; that comes first.

    Attributes:
        name: the name it has on the command line, after vLLM's ``--reasoning-parser``.
        start: what begins it.
        end: what ends it.
        detect: whether a chat template (its text) and a vocabulary are of this family.
        also_ends: markers of tool calls that end it too, and are not read.
        silent: further markers, of what is no reasoning; they are not shown.
        more_markers: further texts that must not be hidden from the parser.
        is_harmony: whether it is OpenAI's Harmony, where channels may come anywhere.
        read_turn: reads the whole turn, where reasoning may stand anywhere; None: it is first.
    """

    name: str
    start: str
    end: str
    detect: Callable[[str, Container[str]], bool]
    also_ends: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    more_markers: tuple[str, ...] = ()
    is_harmony: bool = False
    read_turn: Callable[[ReadContext], Steps[None]] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own."""
        return (self.start, self.end, *self.more_markers)

    def keeps_special_tokens(self, special_tokens: Container[str]) -> bool:
        """Whether the text must be detokenised with its special tokens."""
        return any(marker in special_tokens for marker in (*self.markers, *self.silent))

    def is_open_after(self, prompt: str, begun: str = "") -> bool:
        """Whether the rendered prompt ends inside the reasoning.

        ``begun`` is what it has of the answer already, where that is given.
        """
        return prompt.rstrip().endswith(self.start) or begun.rfind(self.start) > begun.rfind(
            self.end
        )


def tools_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Tools as the chat API or the Responses API writes them; those that are no functions left out.

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
