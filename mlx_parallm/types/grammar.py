"""The structure that the text of a sample must match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar that the text of a sample must match.

    Attributes:
        text: the grammar in llguidance's JSON form (``{"grammars": […]}``), already checked.
        begins_after: a text, such as ``</think>``, after which the grammar applies. Tokens before
            it are free, but the sample may not end there. None: it applies from the first token.
        free_starts: with ``begins_after``: texts, such as ``<think>``, of one or more tokens. The
            grammar applies from the first token unless the sample begins with one of them.
        param: the field of the request that asks for it, which refusals name.
    """

    text: str
    begins_after: str | None = None
    free_starts: tuple[str, ...] = ()
    param: str = field(default="structured_outputs", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Structure that the text of a sample must match: exactly one. Names and meanings are vLLM's.

    Attributes:
        json: a JSON schema, as an object or as text.
        regex: a regular expression for the whole text, in Rust's syntax.
        choice: texts, of which it is one.
        grammar: a context-free grammar, in llguidance's Lark or in GBNF.
        json_object: True for any JSON object.
        structural_tag: text with constrained parts, as an object or as JSON text; see
            docs/structured-output.md.
        disable_any_whitespace: with ``json`` or ``json_object``: no white space between tokens.
        disable_additional_properties: must be False: write ``additionalProperties`` in the schema.
        whitespace_pattern: must be None: it cannot be set here.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
