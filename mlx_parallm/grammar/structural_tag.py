"""Compiles structural tags: text in which some parts are constrained.

It reads vLLM's older form, ``{"structures": [{"begin", "schema", "end"}], "triggers"}``, and
XGrammar's, ``{"type": "structural_tag", "format": {…}}``
(https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.grammar.lark import (
    LarkBuilder,
    SpecialTokens,
    json_schema_grammar,
    lark_grammar,
    lark_of_either,
    regex_grammar,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_mapping, is_text_list

MAX_TAGS = 512


def structural_tag_grammar(text: str, specials: SpecialTokens) -> dict[str, Any]:
    """Return the llguidance grammar of a structural tag's JSON text.

    Raises:
        InvalidRequestError: a key is missing, or a format is unknown.
    """
    tag = json.loads(text)
    reader = _Reader(LarkBuilder(specials))
    if "format" in tag:
        return reader.builder.grammar(reader.expression(_object(tag, "format")))
    if "structures" in tag:
        return reader.builder.grammar(reader.expression(_from_legacy(tag)))
    raise InvalidRequestError(
        'A structural tag must have "format", or "structures" and "triggers".'
    )


def _from_legacy(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the older form in the newer one."""
    tags = [
        {
            "type": "tag",
            "begin": _text(structure, "begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": _text(structure, "end"),
        }
        for structure in _objects(tag, "structures")
    ]
    return {"type": "triggered_tags", "triggers": _texts(tag, "triggers"), "tags": tags}


class _Reader:
    """Turns formats into Lark expressions."""

    def __init__(self, builder: LarkBuilder) -> None:
        self.builder = builder
        self._formats: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, node: Mapping[str, Any]) -> str:
        """Return what a format matches, as an expression of rules and literals."""
        read = self._formats.get(str(node.get("type")))
        if read is None:
            raise InvalidRequestError(
                f"A structural tag's format has type {str(node.get('type'))[:64]!r}; "
                f"known are {', '.join(self._formats)}."
            )
        return read(node)

    def _const_string(self, node: Mapping[str, Any]) -> str:
        return self.builder.literal(_text(node, "value"))

    def _json_schema(self, node: Mapping[str, Any]) -> str:
        schema = node.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise InvalidRequestError("json_schema must be a JSON object.")
        text = json.dumps(schema, ensure_ascii=False)
        return self.builder.other(json_schema_grammar(text, lenient=not node.get("strict", False)))

    def _regex(self, node: Mapping[str, Any]) -> str:
        return self.builder.other(regex_grammar(_text(node, "pattern")))

    def _grammar(self, node: Mapping[str, Any]) -> str:
        return self.builder.other(lark_grammar(lark_of_either(_text(node, "grammar"))))

    def _any_text(self, _node: Mapping[str, Any]) -> str:
        return self.builder.text_until("")

    def _sequence(self, node: Mapping[str, Any]) -> str:
        return " ".join(self.expression(element) for element in _objects(node, "elements"))

    def _or(self, node: Mapping[str, Any]) -> str:
        elements = _objects(node, "elements")
        options = [self.builder.rule(self.expression(element)) for element in elements]
        return f"({' | '.join(options)})"

    def _tag(self, node: Mapping[str, Any], skip: int = 0) -> str:
        """Return a tag without the first ``skip`` characters of its begin."""
        begin = self.builder.literal(_text(node, "begin")[skip:])
        return f"{begin} {self._content(node)}".strip()

    def _content(self, node: Mapping[str, Any]) -> str:
        content, end = _object(node, "content"), _end(node)
        if content.get("type") == "any_text":
            return self.builder.text_until(end)
        return f"{self.expression(content)} {self.builder.literal(end)}".strip()

    def _triggered_tags(self, node: Mapping[str, Any]) -> str:
        """Return an expression for any text in which a tag must follow each trigger."""
        triggers, tags = _texts(node, "triggers"), _tags(node)
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise InvalidRequestError(
                    f"The tag {begin[:64]!r} must begin with one of the triggers."
                )
            bodies[trigger].append(self.builder.rule(self._tag(tag, len(trigger))))
        options = [
            self.builder.rule(f"{self.builder.text_until(trigger)} ({' | '.join(rules)})")
            for trigger, rules in bodies.items()
            if rules
        ]
        group = self.builder.rule(" | ".join(options))
        if node.get("stop_after_first"):
            return group if node.get("at_least_one") else f"({group} | {self._any_text(node)})"
        return f"{group}{'+' if node.get('at_least_one') else '*'} {self._any_text(node)}"

    def _tags_with_separator(self, node: Mapping[str, Any]) -> str:
        tag = self.builder.rule(
            " | ".join(self.builder.rule(self._tag(tag)) for tag in _tags(node))
        )
        separator = self.builder.literal(_text(node, "separator"))
        repeated = "" if node.get("stop_after_first") else f" ({separator} {tag})*"
        return f"({tag}{repeated}){'' if node.get('at_least_one') else '?'}"


def _tags(node: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    tags = _objects(node, "tags")
    if len(tags) > MAX_TAGS:
        raise InvalidRequestError(f"A structural tag can have at most {MAX_TAGS} tags.")
    return tags


def _end(node: Mapping[str, Any]) -> str:
    end = node.get("end", "")
    # XGrammar takes several ends; the model must write the first.
    if is_list(end) and end:
        end = end[0]
    if not isinstance(end, str):
        raise InvalidRequestError("A tag's end must be a text.")
    return end


def _text(node: Mapping[str, Any], key: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"A structural tag's {key} must be a text.")
    return value


def _texts(node: Mapping[str, Any], key: str) -> list[str]:
    value = node.get(key)
    if not is_text_list(value) or not value or not all(value):
        raise InvalidRequestError(f"A structural tag's {key} must be texts, none of them empty.")
    return value


def _object(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = node.get(key)
    if not is_mapping(value):
        raise InvalidRequestError(f"A structural tag's {key} must be a JSON object.")
    return value


def _objects(node: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = node.get(key)
    if not is_list(value) or not value or not all(map(is_mapping, value)):
        raise InvalidRequestError(f"A structural tag's {key} must be JSON objects, at least one.")
    return value
