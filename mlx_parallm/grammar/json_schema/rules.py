"""Rules that replace keywords of JSON schema that llguidance does not enforce."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mlx_parallm.grammar.json_schema.counts import counted
from mlx_parallm.grammar.json_schema.disjoint import Disjointness
from mlx_parallm.grammar.json_schema.document import Document
from mlx_parallm.grammar.json_schema.keywords import Schema, restricts
from mlx_parallm.grammar.json_schema.negation import Negation, any_of
from mlx_parallm.grammar.json_schema.patterns import ENFORCED, FORMATS, NARROWER
from mlx_parallm.grammar.json_schema.unique import unique_arrays
from mlx_parallm.types.json_values import is_list, is_object, is_text_list

# MAX_OPTIONS of a oneOf that are compared by pairs.
MAX_OPTIONS = 64
# MAX_PRODUCT of the alternatives that keep an option apart from others, and MAX_CHARS of them:
# llguidance intersects each with all others, and minds every character.
MAX_PRODUCT = 64
MAX_CHARS = 2_000

#: ``Rule``: removes a keyword from a schema and returns what its values must match instead. What
#: cannot be expressed stays.
Rule = Callable[[Schema], list[Any]]


# _PRESENT: values that are not empty, and texts, besides which expressions say nothing.
_PRESENT: list[Schema] = [
    {"type": "array", "minItems": 1},
    {"type": "string"},
    {"type": "string", "minLength": 1},
]


class Rules:
    """Rules for the schemas of one document.

    Attributes:
        by_keyword: the rules.
        disjoint: proves that schemas exclude each other.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self.disjoint = Disjointness(document)
        self._negation = Negation(document)
        self.by_keyword: Mapping[str, Rule] = {
            "format": _format,
            "oneOf": self._one_of,
            "not": self._not,
            "if": self._if,
            "then": _without_if,
            "else": _without_if,
            "dependencies": _dependencies("dependencies"),
            "dependentRequired": _dependencies("dependentRequired"),
            "dependentSchemas": _dependencies("dependentSchemas"),
            "maxProperties": counted,
            "minProperties": counted,
            "propertyNames": self._property_names,
            "uniqueItems": self._unique_items,
        }

    def _one_of(self, schema: Schema) -> list[Any]:
        options = schema["oneOf"]
        if not is_list(options) or not 0 < len(options) <= MAX_OPTIONS:
            return []
        rest = {key: value for key, value in schema.items() if key != "oneOf"}
        written: list[Any] = []
        for option in options:
            alone = self._alone(option, [each for each in options if each is not option], rest)
            if alone is None:
                return []
            written += alone
        if not written:
            return []
        del schema["oneOf"]
        return [any_of(written)]

    def _alone(self, option: Any, others: list[Any], rest: Schema) -> list[Any] | None:
        """Return the values of an option that no other one matches, none if there are none.

        None: they are not known.
        """
        near = [each for each in others if not self.disjoint.is_proven(option, each, rest)]
        names = self.disjoint.names(option, rest) if near else []
        choices: list[list[Any]] = []
        for other in near:
            negated = self._negated(other, {"allOf": [option, rest]}, names)
            if negated is None:
                negated = self._distinguished(option, [other], rest, names)
                if not negated:
                    return None
            if not negated:
                return []
            choices.append(negated)
        if self._is_much(choices):
            present = self._distinguished(option, near, rest, names)
            choices = (
                [present] if present else [sorted(each, key=self._size)[:1] for each in choices]
            )
            if self._is_much(choices):
                return None
        return [{"allOf": [option, *map(any_of, choices)]} if choices else option]

    def _distinguished(
        self, option: Any, others: list[Any], rest: Schema, names: Collection[str]
    ) -> list[Any]:
        """Return a part whose mere presence keeps an option apart from others; none if unknown."""
        parts: list[Schema] = [{"type": "object", "required": [name]} for name in names]
        for part in [*parts, *_PRESENT]:
            both = {"allOf": [option, part]}
            if self.disjoint.is_proven(option, part, rest):
                continue
            if all(self.disjoint.is_proven(both, other, rest) for other in others):
                return [part]
        return []

    def _negated(self, schema: Any, rest: Schema, names: Collection[str] = ()) -> list[Any] | None:
        """Return the alternatives to a schema among values of ``rest``.

        None: not all are known, and the known ones have no such value.
        """
        alternatives = self._negation.of(schema, names)
        kept = [each for each in alternatives if not self.disjoint.is_proven(each, rest)]
        if self._is_much([kept]):
            kept = [each for each in kept if self._size(each) <= MAX_CHARS // len(kept)]
        is_closed = self.disjoint.is_closed(rest)
        return kept if kept or self._negation.is_exact(schema, is_closed=is_closed) else None

    def _is_much(self, choices: list[list[Any]]) -> bool:
        """True if it would take long to keep to one alternative of each list."""
        is_large = sum(self._size(each) for choice in choices for each in choice) > MAX_CHARS
        return is_large or math.prod(map(len, choices)) > MAX_PRODUCT

    def _size(self, schema: Any) -> int:
        size = len(json.dumps(schema))
        self._document.work.spend(4 + size // 64)
        return size

    def _not(self, schema: Schema) -> list[Any]:
        rest = {key: value for key, value in schema.items() if key != "not"}
        negated = self._negated(schema["not"], rest, self.disjoint.names(rest))
        if negated is None:
            return []
        del schema["not"]
        return [any_of(negated)] if negated else [False]

    def _if(self, schema: Schema) -> list[Any]:
        condition = schema["if"]
        rest = {key: each for key, each in schema.items() if key not in ("if", "then", "else")}
        negated = self._negated(condition, rest, self.disjoint.names(rest))
        if negated is None:
            return []
        del schema["if"]
        yes, no = schema.pop("then", True), schema.pop("else", True)
        if yes is True and no is True:
            return []
        options: list[Any] = []
        if not self.disjoint.is_proven(condition, rest):
            options.append(condition if yes is True else {"allOf": [condition, yes]})
        if negated and no is not True:
            negated = [{"allOf": [any_of(negated), no]}]
        return [any_of([*options, *negated])]

    def _unique_items(self, schema: Schema) -> list[Any]:
        arrays = [] if schema["uniqueItems"] is False else unique_arrays(schema, self._document)
        if arrays is None:
            return []
        del schema["uniqueItems"]
        return arrays

    def _property_names(self, schema: Schema) -> list[Any]:
        parts = self._document.conjuncts(schema["propertyNames"])
        named = [_names(part) for part in parts]
        known = [each for each in named if each is not None]
        if len(known) < len(named) or not self._document.is_whole(schema["propertyNames"]):
            return []
        del schema["propertyNames"]
        return [each for each in known if each]


def _without_if(schema: Schema) -> list[Any]:
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    return []


def _names(part: Any) -> Schema | None:
    """Return the objects whose names match a schema; None if that is unknown."""
    if not is_object(part):
        return {} if part is True else {"maxProperties": 0}
    part = {key: each for key, each in part.items() if key != "type" or each != "string"}
    patterns = [each.get("pattern") for each in _format(part)]
    own = {key for key in part if restricts([key]) or key == "format"}
    if not own:
        return _named(patterns[0]) if patterns else {}
    if patterns or None in patterns:
        return None
    if own == {"pattern"}:
        return _named(part["pattern"])
    if own == {"enum"} and is_text_list(part["enum"]):
        names = dict.fromkeys(part["enum"], True)
        return {"properties": names, "additionalProperties": False}
    if own <= {"minLength", "maxLength"}:
        least, most = part.get("minLength", 0), part.get("maxLength", "")
        return _named(rf"^(?s:.{{{least},{most}}})$")
    return None


def _named(pattern: Any) -> Schema:
    return {"patternProperties": {pattern: True}, "additionalProperties": False}


def _format(schema: Schema) -> list[Any]:
    name = schema.get("format")
    if not isinstance(name, str) or name in ENFORCED:
        return []
    del schema["format"]
    name = NARROWER.get(name, name)
    if name in ENFORCED:
        return [{"format": name}]
    return [{"pattern": FORMATS[name]}] if name in FORMATS else []


def _dependencies(key: str) -> Rule:
    def rule(schema: Schema) -> list[Any]:
        """Return, for each name, that it is absent, or the rest holds."""
        if not is_object(schema[key]):
            return []
        rules: list[Any] = []
        for name, needed in schema.pop(key).items():
            if needed is True or needed in ([], {}):
                continue
            present = [{"required": [name]}, needed]
            if is_text_list(needed):
                present = [{"required": [name, *needed]}]
            rules.append({"anyOf": [{"properties": {name: False}}, {"allOf": present}]})
        return rules

    return rule
