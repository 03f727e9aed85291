"""Writes the values that a JSON schema does not accept as schemas without ``not``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from mlx_parallm.grammar.json_schema.disjoint import kind_of, kinds_of
from mlx_parallm.grammar.json_schema.document import Document
from mlx_parallm.grammar.json_schema.keywords import ANNOTATIONS, Schema
from mlx_parallm.grammar.json_schema.patterns import complement, other_texts
from mlx_parallm.types.json_values import is_list, is_object, is_text_list

# TYPES whose names stand for all of their values.
TYPES = ("array", "boolean", "null", "number", "object", "string")
# MAX_DEPTH of schemas within a schema that is negated.
MAX_DEPTH = 6
# MAX_PAIRED: options of a oneOf of which two may match in the negation.
MAX_PAIRED = 4


class Negation:
    """Negates schemas of a document.

    A schema's negation is a list of alternatives: a value that matches one of them does not match
    the schema. Values that only keywords without a counterpart refuse match none.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        # By identity, names and depth: a schema and its alternatives.
        self._known: dict[tuple[int, tuple[str, ...], int], tuple[Any, list[Any]]] = {}
        self._exact: dict[tuple[int, bool, int], tuple[Any, bool]] = {}

    def of(self, schema: Any, names: Collection[str] = (), depth: int = MAX_DEPTH) -> list[Any]:
        """Return the alternatives to a schema; none if all values match, or they are not known.

        Args:
            schema: the schema.
            names: properties that an object may have, for schemas that forbid others.
            depth: how deep schemas within it are negated.
        """
        if depth == 0:
            return []
        key = (id(schema), tuple(names), depth)
        known = self._known.get(key)
        if known is None or known[0] is not schema:
            alternatives = [
                alternative
                for part in self._document.conjuncts(schema)
                for alternative in self._of_part(part, names, depth - 1)
            ]
            self._document.work.spend(4 * len(alternatives))
            self._known[key] = known = (schema, alternatives)
        return known[1]

    def is_exact(self, schema: Any, *, is_closed: bool = False, depth: int = MAX_DEPTH) -> bool:
        """True if every value matches the schema or one of its alternatives.

        ``is_closed``: the values have no other properties than the names that ``of`` takes.
        """
        key = (id(schema), is_closed, depth)
        known = self._exact.get(key)
        if known is None or known[0] is not schema:
            is_exact = depth > 0 and self._is_exact(schema, is_closed, depth - 1)
            self._exact[key] = known = (schema, is_exact)
        return known[1]

    def _is_exact(self, schema: Any, is_closed: bool, depth: int) -> bool:
        parts = self._document.conjuncts(schema)
        if is_closed:
            parts = [_opened(part) for part in parts]
        return self._document.is_whole(schema) and all(
            self._is_exact_part(part, depth) for part in parts
        )

    def _of_part(self, part: Any, names: Collection[str], depth: int) -> Iterator[Any]:
        if not is_object(part):
            yield from [True] if part is False else []
            return
        for key, value in part.items():
            self._document.work.spend(_num_steps(value))
            if key in _SIMPLE:
                yield from _SIMPLE[key](value, part)
        yield from self._of_object(part, names, depth)
        yield from self._of_objects(_values(part), names, depth)
        for key in ("anyOf", "oneOf"):
            options = part.get(key)
            if is_list(options):
                yield from _all_of([self.of(each, names, depth) for each in options])
                if key == "oneOf" and len(options) <= MAX_PAIRED:
                    yield from (
                        {"allOf": pair} for pair in map(list, itertools.combinations(options, 2))
                    )
        if "not" in part:
            yield part["not"]

    def _of_object(self, part: Schema, names: Collection[str], depth: int) -> Iterator[Any]:
        own = part.get("properties")
        properties = own if is_object(own) else {}
        for name, schema in properties.items():
            for other in self.of(schema, (), depth):
                yield _object_with(name, other)
        if part.get("additionalProperties") is False and not part.get("patternProperties"):
            self._document.work.spend(len(names))
            for name in names:
                if name not in properties:
                    yield {"type": "object", "required": [name]}

    def _of_objects(self, values: list[Any], names: Collection[str], depth: int) -> Iterator[Any]:
        """Return the alternatives to all objects among values."""
        objects = [value for value in values if is_object(value) and value]
        if objects:
            others = [self.of(_schema_of(value), names, depth) for value in objects]
            is_empty = [{"type": "object", "minProperties": 1}] if {} in values else []
            yield from _all_of([[{"type": "object"}], *others, *filter(None, [is_empty])])

    def _is_exact_part(self, part: Any, depth: int) -> bool:
        return not is_object(part) or all(
            self._is_exact_keyword(key, value, depth) for key, value in part.items()
        )

    def _is_exact_keyword(self, key: str, value: Any, depth: int) -> bool:
        self._document.work.spend(_num_steps(value))
        match key:
            case "properties" if is_object(value):
                return all(self.is_exact(each, depth=depth) for each in value.values())
            case "anyOf" if is_list(value):
                return all(self.is_exact(each, depth=depth) for each in value)
            case "type":
                return "fraction" in kinds_of(value) or "integer" not in kinds_of(value)
            case "pattern":
                return isinstance(value, str) and complement(value) is not None
            case "enum" | "const":
                values = value if key == "enum" and is_list(value) else [value]
                return not any(kind_of(each) in ("array", "object") for each in values)
            case "format":
                return False
            case _:
                return key in _SIMPLE or key in ANNOTATIONS or key == "not"


def _num_steps(value: Any) -> int:
    """Return about how long a keyword's value is looked at: texts become expressions."""
    texts = value if is_list(value) else [value]
    return 4 * len(texts) + sum(4 * len(each) for each in texts if isinstance(each, str))


def _opened(part: Any) -> Any:
    """Return a conjunct that allows unnamed properties, unless it has patterns of names."""
    is_closed = is_object(part) and part.get("additionalProperties") is False
    if not is_closed or part.get("patternProperties"):
        return part
    return {key: each for key, each in part.items() if key != "additionalProperties"}


def any_of(alternatives: list[Any]) -> Any:
    """Return a schema that one of several must match."""
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _all_of(options: list[list[Any]]) -> Iterator[Any]:
    if all(options):
        yield {"allOf": [any_of(each) for each in options]}


def _object_with(name: str, schema: Any) -> Schema:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def _schema_of(value: dict[str, Any]) -> Schema:
    """Return the schema of the objects that equal a value."""
    properties = {name: {"const": each} for name, each in value.items()}
    return {"properties": properties, "required": list(value), "additionalProperties": False}


def _values(part: Schema) -> list[Any]:
    own = part.get("enum")
    return [*(own if is_list(own) else ()), *([part["const"]] if "const" in part else ())]


def _other_types(value: Any, _part: Schema) -> Iterator[Any]:
    kinds = kinds_of(value)
    rest = [each for each in TYPES if not kinds & kinds_of(each)]
    if rest:
        yield {"type": rest}


def _other_values(values: list[Any]) -> Iterator[Any]:
    """Yield what is none of these values, besides objects and arrays where there are some."""
    kinds = {kind_of(value) for value in values}
    rest = [each for each in TYPES if not kinds & kinds_of(each)]
    if rest:
        yield {"type": rest}
    for flag in (True, False):
        if "boolean" in kinds and not any(value is flag for value in values):
            yield {"const": flag}
    texts = [value for value in values if isinstance(value, str)]
    pattern = other_texts(texts) if texts else None
    if pattern is not None:
        yield {"type": "string", "pattern": pattern}
    yield from _between(sorted(each for each in values if kind_of(each) in ("integer", "fraction")))
    for kind, least in (("array", "minItems"), ("object", "minProperties")):
        own = [value for value in values if kind_of(value) == kind]
        if own and not any(own):
            yield {"type": kind, least: 1}


def _between(numbers: list[float]) -> Iterator[Any]:
    for below, above in zip([None, *numbers], [*numbers, None], strict=True):
        if numbers and below != above:
            low = {} if below is None else {"exclusiveMinimum": below}
            yield {"type": "number"} | low | ({} if above is None else {"exclusiveMaximum": above})


def _enum(value: Any, _part: Schema) -> Iterator[Any]:
    yield from _other_values(value) if is_list(value) else ()


def _const(value: Any, _part: Schema) -> Iterator[Any]:
    yield from _other_values([value])


def _required(value: Any, _part: Schema) -> Iterator[Any]:
    for name in value if is_text_list(value) else ():
        yield {"type": "object", "properties": {name: False}}


def _pattern(value: Any, _part: Schema) -> Iterator[Any]:
    pattern = complement(value) if isinstance(value, str) else None
    if pattern is not None:
        yield {"type": "string", "pattern": pattern}


def _more(kind: str, key: str) -> _Other:
    """Return what negates a keyword of the most items."""

    def other(value: Any, _part: Schema) -> Iterator[Any]:
        if isinstance(value, int) and not isinstance(value, bool):
            yield {"type": kind, key: value + 1}

    return other


def _fewer(kind: str, key: str) -> _Other:
    """Return what negates a keyword of the least items."""

    def other(value: Any, _part: Schema) -> Iterator[Any]:
        if isinstance(value, int) and value > 0:
            yield {"type": kind, key: value - 1}

    return other


def _beyond(key: str, inclusive: str, exclusive: str) -> _Other:
    """Return what negates ``minimum`` or ``maximum``, exclusive in the form of draft 4 or not."""

    def other(value: Any, part: Schema) -> Iterator[Any]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield {"type": "number", inclusive if part.get(key) is True else exclusive: value}

    return other


_Other = Callable[[Any, Schema], Iterator[Any]]
_SIMPLE: Mapping[str, _Other] = {
    "type": _other_types,
    "enum": _enum,
    "const": _const,
    "required": _required,
    "pattern": _pattern,
    "minLength": _fewer("string", "maxLength"),
    "maxLength": _more("string", "minLength"),
    "minItems": _fewer("array", "maxItems"),
    "maxItems": _more("array", "minItems"),
    "minProperties": _fewer("object", "maxProperties"),
    "maxProperties": _more("object", "minProperties"),
    "minimum": _beyond("exclusiveMinimum", "maximum", "exclusiveMaximum"),
    "maximum": _beyond("exclusiveMaximum", "minimum", "exclusiveMinimum"),
    "exclusiveMinimum": _beyond("", "maximum", "maximum"),
    "exclusiveMaximum": _beyond("", "minimum", "minimum"),
}
