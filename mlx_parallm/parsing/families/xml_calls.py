"""Qwen3-Coder, MiniMax M2, DeepSeek V3.2, Seed-OSS and others write XML-like tags.

Values of parameters are plain text; they become JSON by the types of the tool's schema.

Sources: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, MiniMaxAI/MiniMax-M2,
ByteDance-Seed/Seed-OSS-36B-Instruct and deepseek-ai/DeepSeek-V3.2 (its encoding in Jinja);
openbmb/MiniCPM5-1B.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

from mlx_parallm.parsing.families.marked import LONGEST_NAME
from mlx_parallm.parsing.families.text_values import (
    TEXT,
    Parameters,
    ValueMarkup,
    expect_parameters,
    pass_text_value,
    read_calls_of_section,
    write_object,
)
from mlx_parallm.parsing.formats import ReadContext, ToolFormat
from mlx_parallm.parsing.json_text import string_inside
from mlx_parallm.parsing.reader import MalformedError, Reader, Steps

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_HEADER = re.compile(
    r"""[ ]*(?:\w+=)?+(?P<quote>["']?)(?P<name>[^"'\s<>=]+)(?P=quote)(?P<rest>[^<>\n]*)"""
)


@dataclass(frozen=True, slots=True)
class XmlSyntax:
    """The tags of a format.

    Attributes:
        sections: tags that open a section of calls.
        section_ends: tags that close a section.
        call: the beginning of a call's tag, up to its name; a ``>`` ends that tag.
        call_end: the tag that ends a call.
        parameter: the beginning of a parameter's tag, up to its name.
        parameter_end: the tag that ends a parameter.
        needs_section: True if calls stand only in sections.
        trims_newline: True if one newline at either end of a value belongs to the markup.
        has_lines: True if tags of parameters and calls stand on lines of their own.
    """

    sections: tuple[str, ...]
    section_ends: tuple[str, ...]
    call: str
    call_end: str
    parameter: str
    parameter_end: str
    needs_section: bool = True
    trims_newline: bool = True
    has_lines: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """All tags that may be tokens."""
        return (*self.sections, *self.section_ends, self.call_end, self.parameter_end)

    @property
    def starts(self) -> tuple[str, ...]:
        """The tags that begin calls in content."""
        return self.sections if self.needs_section else (*self.sections, self.call)

    @property
    def ends(self) -> tuple[str, ...]:
        """The tags that end calls and sections."""
        return (self.call_end, *self.section_ends)

    @property
    def values(self) -> ValueMarkup:
        """The markup around values."""
        return ValueMarkup(
            self.parameter,
            partial(_key, syntax=self),
            self.ends,
            (self.call, *self.sections),
            self.has_lines,
        )


def read_section(context: ReadContext, syntax: XmlSyntax) -> Steps[None]:
    """Read the calls of one section.

    Raises:
        MalformedError: it is no section, or its rest is broken.
    """
    reader, writer = context.reader, context.writer
    section = yield from reader.accept(*syntax.sections)
    yield from read_calls_of_section(context, syntax.call, partial(_call, syntax=syntax))
    if section is not None and (yield from reader.accept(*syntax.section_ends)):
        writer.end_section()


def _call(context: ReadContext, syntax: XmlSyntax) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(syntax.call)
    name, rest = yield from _header(reader)
    if rest.endswith("/"):
        writer.begin_call(name)
        writer.end_call()
        return
    yield from expect_parameters(reader, syntax.values)
    writer.begin_call(name)
    members = _parameters(context, syntax, Parameters(context.tool(name)))
    yield from write_object(context, members)
    writer.end_call()


def _parameters(context: ReadContext, syntax: XmlSyntax, parameters: Parameters) -> Steps[None]:
    reader, writer = context.reader, context.writer
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.next_is(*syntax.ends)):
            yield from reader.accept(syntax.call_end)
            return
        yield from reader.expect(syntax.parameter)
        key, rest = yield from _header(reader)
        parameters.keys.add(key)
        writer.arguments(f'{separator}"{string_inside(key)}": ')
        yield from _value(context, syntax, _value_types(parameters, key, rest), parameters)
        separator = ", "


def _key(reader: Reader, syntax: XmlSyntax) -> Steps[str]:
    """Return the key in a parameter's tag.

    Raises:
        MalformedError: it is no such tag.
    """
    yield from reader.expect(syntax.parameter)
    key, _ = yield from _header(reader)
    return key


def _header(reader: Reader) -> Steps[tuple[str, str]]:
    """Return the name in a tag, and the tag's other text."""
    text = yield from reader.until(">", limit=LONGEST_NAME)
    tag = text.removesuffix("/")
    match = _HEADER.fullmatch(tag)
    if match is None:
        raise MalformedError
    return match["name"], match["rest"] + text[len(tag) :]


def _value_types(parameters: Parameters, key: str, attributes: str) -> frozenset[str] | None:
    """Return the types of a value; in DeepSeek's format an attribute can say that it is text."""
    types = parameters.types(key)
    if 'string="true"' in attributes and (types is None or types >= TEXT):
        return TEXT
    if types is None and 'string="false"' not in attributes:
        return TEXT
    return types


def _value(
    context: ReadContext,
    syntax: XmlSyntax,
    types: frozenset[str] | None,
    parameters: Parameters,
) -> Steps[None]:
    reader = context.reader
    if syntax.trims_newline:
        yield from reader.accept("\n")
    ends: tuple[str, ...] = (syntax.parameter_end,)
    is_cdata = yield from reader.accept(_CDATA)
    if is_cdata:
        ends = (f"{_CDATA_END}{syntax.parameter_end}",)
    elif syntax.trims_newline:
        ends = (f"\n{syntax.parameter_end}", syntax.parameter_end)
    yield from pass_text_value(
        context, ends, types, syntax.values, parameters, may_lack_end=not is_cdata
    )


def _format(name: str, summary: str, syntax: XmlSyntax, *signs: str) -> ToolFormat:
    def detect(template: str, _: Container[str]) -> bool:
        return all(sign in template for sign in signs)

    return ToolFormat(
        name=name,
        summary=summary,
        call=partial(read_section, syntax=syntax),
        markers=syntax.markers,
        detect=detect,
        starts=syntax.starts,
        ends=syntax.ends,
    )


def _functions(sections: tuple[str, ...], section_ends: tuple[str, ...]) -> XmlSyntax:
    return XmlSyntax(
        sections,
        section_ends,
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        needs_section=False,
    )


def invokes(prefix: str, sections: tuple[str, ...], *, trims: bool = True) -> XmlSyntax:
    """Return the tags ``invoke`` and ``parameter`` with a prefix, in sections of these names.

    No text has such tags by accident, so that a section's tag may be missing.
    """
    return XmlSyntax(
        tuple(f"<{prefix}{section}>" for section in sections),
        tuple(f"</{prefix}{section}>" for section in sections),
        f"<{prefix}invoke ",
        f"</{prefix}invoke>",
        f"<{prefix}parameter ",
        f"</{prefix}parameter>",
        needs_section=False,
        trims_newline=trims,
    )


QWEN3_CODER = _format(
    "qwen3_coder",
    "<tool_call><function=name><parameter=key>value</parameter></function></tool_call>",
    _functions(("<tool_call>",), ("</tool_call>",)),
    "<function=",
    "<tool_call>",
)
SEED_OSS = _format(
    "seed_oss",
    "<seed:tool_call><function=name><parameter=key>value</parameter></function></seed:tool_call>",
    _functions(("<seed:tool_call>",), ("</seed:tool_call>",)),
    "seed:tool_call>",
)
_M2 = XmlSyntax(
    ("<minimax:tool_call>",),
    ("</minimax:tool_call>",),
    "<invoke ",
    "</invoke>",
    "<parameter ",
    "</parameter>",
)
MINIMAX_M2 = _format(
    "minimax_m2",
    '<minimax:tool_call><invoke name="f"><parameter name="key">value</parameter></invoke>…',
    _M2,
    "<minimax:tool_call>",
)
DEEPSEEK_V32 = _format(
    "deepseek_v32",
    '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="key" …',
    invokes("｜DSML｜", ("function_calls", "tool_calls"), trims=False),
    "｜DSML｜",
)
MINICPM5 = _format(
    "minicpm5",
    '<function name="f"><param name="key">value</param></function>',
    XmlSyntax(
        (),
        (),
        "<function ",
        "</function>",
        "<param ",
        "</param>",
        needs_section=False,
        has_lines=False,
    ),
    '<function name="',
    '<param name="',
)
