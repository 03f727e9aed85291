"""Proves that no value matches two JSON schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.grammar.json_schema.document import Document
from mlx_parallm.grammar.regex.automaton import Comparison
from mlx_parallm.types.json_values import is_list, is_object, is_text_list

#: ``KINDS``: the types of values, numbers by whether they are whole.
KINDS = frozenset(["array", "boolean", "fraction", "integer", "null", "object", "string"])
# MAX_DEPTH of properties within properties, and of alternatives, that a proof looks at.
MAX_DEPTH = 4
# MAX_STEPS of all proofs of a document together.
MAX_STEPS = 5_000
# MAX_TEXT_STEPS: states of expressions that are visited for a document.
MAX_TEXT_STEPS = 100_000
# MAX_LENGTH of texts that is compared with expressions.
MAX_LENGTH = 256
# BOUNDS: keywords of least and most values, by kind of value.
BOUNDS = {
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "string": ("minLength", "maxLength"),
}


class Disjointness:
    """Proves it for pairs of schemas of a document, within a limit of work."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._steps = 0
        self._texts = Comparison(MAX_TEXT_STEPS)
        # Lists of values that were read, by identity, with what they are by their canonical JSON.
        self._values: dict[int, tuple[list[Any], dict[str, Any]]] = {}

    def is_proven(self, first: Any, second: Any, both: Any = True) -> bool:
        """True if no value matches both, and a third schema; False if that is not known."""
        return self._alternatives([first, both], [second], MAX_DEPTH)

    def names(self, *schemas: Any) -> list[str]:
        """Return the properties that schemas name."""
        facts = self._facts(schemas)
        values = [value for value in (facts.values or {}).values() if is_object(value)]
        own = [name for value in values for name in value]
        return list(dict.fromkeys([*facts.properties, *sorted(facts.required), *own]))

    def is_closed(self, schema: Any) -> bool:
        """True if objects have no other properties than those that ``names`` returns."""
        facts = self._facts([schema])
        return bool(facts.closed) or facts.values is not None

    def kinds(self, schema: Any) -> frozenset[str]:
        """Return the kinds of values that a schema may accept."""
        facts = self._facts([schema])
        for options in facts.options:
            facts.kinds &= frozenset().union(*map(self.kinds, options))
        return facts.kinds

    def _alternatives(self, first: Sequence[Any], second: Sequence[Any], depth: int) -> bool:
        """True if no value matches all schemas of both lists."""
        if self._steps > MAX_STEPS:
            return False
        mine, theirs = self._facts(first), self._facts(second)
        self._steps += 1 + (len(mine.properties) + len(theirs.properties)) // 8
        if self._are_apart(mine, theirs, depth):
            return True
        if depth == 0:
            return False
        for facts, rest in ((mine, second), (theirs, first)):
            for options in facts.options:
                kept = [_without(each, options) for each in facts.schemas]
                if all(self._alternatives([*kept, each], rest, depth - 1) for each in options):
                    return True
        return False

    def _facts(self, schemas: Iterable[Any]) -> _Facts:
        parts = [part for each in schemas for part in self._document.conjuncts(each)]
        facts = _Facts(parts)
        for part in parts:
            facts.add(part)
            for values in _value_lists(part):
                facts.add_values(self._by_json(values))
        num_values = len(facts.values or ())
        self._document.work.spend(16 * len(parts) + len(facts.properties) + num_values // 8)
        return facts

    def _by_json(self, values: list[Any]) -> dict[str, Any]:
        """Return values by their canonical JSON."""
        known = self._values.get(id(values))
        if known is None or known[0] is not values:
            by_json = {canonical(value): value for value in values}
            self._document.work.spend(8 * len(values) + sum(map(len, by_json)) // 4)
            self._values[id(values)] = known = (values, by_json)
        return known[1]

    def _are_apart(self, mine: _Facts, theirs: _Facts, depth: int) -> bool:
        if mine.values is not None and theirs.values is not None:
            return mine.values.keys().isdisjoint(theirs.values)
        for facts, rest in ((mine, theirs), (theirs, mine)):
            if facts.values is not None:
                return not any(self._fits(value, rest, depth) for value in facts.values.values())
        return all(
            self._kind_apart(kind, mine, theirs, depth) for kind in mine.kinds & theirs.kinds
        )

    def _fits(self, value: Any, facts: _Facts, depth: int) -> bool:
        """False if a value surely breaks a rule."""
        kind = kind_of(value)
        self._document.work.spend(4 + len(facts.schemas))
        if kind not in facts.kinds:
            return False
        if kind in BOUNDS:
            low, high = facts.bounds(*BOUNDS[kind])
            if not low <= len(value) <= high:
                return False
        if kind == "string":
            self._document.work.spend(len(value) * len(facts.patterns))
            return all(self._texts.may_match(pattern, value) for pattern in facts.patterns)
        if kind in ("integer", "fraction"):
            low, high = facts.range()
            return low <= value <= high
        return kind != "object" or depth == 0 or not self._breaks(value, facts, depth)

    def _breaks(self, value: dict[str, Any], facts: _Facts, depth: int) -> bool:
        """True if an object lacks a property, or has one that surely may not be."""
        if not facts.required.issubset(value) or any(map(facts.forbids, value)):
            return True
        return any(
            self._alternatives([{"const": value[name]}], [schema], depth - 1)
            for name, schemas in facts.properties.items()
            if name in value
            for schema in schemas
        )

    def _kind_apart(self, kind: str, mine: _Facts, theirs: _Facts, depth: int) -> bool:
        if kind in BOUNDS:
            names = BOUNDS[kind]
            lows, highs = zip(mine.bounds(*names), theirs.bounds(*names), strict=True)
        elif kind in ("integer", "fraction"):
            lows, highs = zip(mine.range(), theirs.range(), strict=True)
        else:
            return False
        if max(lows) > min(highs):
            return True
        match kind:
            case "object":
                return self._objects_apart(mine, theirs, depth)
            case "array":
                return max(lows) > 0 and self._items_apart(mine, theirs, depth)
            case "string":
                return self._texts_apart([*mine.patterns, *theirs.patterns], max(lows), min(highs))
            case _:
                return False

    def _texts_apart(self, patterns: list[str], least: float, most: float) -> bool:
        if not patterns:
            return False
        if 0 < least <= MAX_LENGTH or most <= MAX_LENGTH:
            end = int(most) if most <= MAX_LENGTH else ""
            patterns = [*patterns, rf"^(?s:.){{{int(min(least, MAX_LENGTH))},{end}}}$"]
        return len(patterns) > 1 and self._texts.is_empty(patterns)

    def _items_apart(self, mine: _Facts, theirs: _Facts, depth: int) -> bool:
        """True if no first item is one of both; the arrays are not empty."""
        if depth == 0 or not mine.first or not theirs.first:
            return False
        return self._alternatives(mine.first, theirs.first, depth - 1)

    def _objects_apart(self, mine: _Facts, theirs: _Facts, depth: int) -> bool:
        names = mine.required | theirs.required
        if any(mine.forbids(name) or theirs.forbids(name) for name in names):
            return True
        return depth > 0 and any(
            self._alternatives(mine.properties[name], theirs.properties[name], depth - 1)
            for name in sorted(names)
            if name in mine.properties and name in theirs.properties
        )


@dataclass(slots=True)
class _Facts:
    """Rules that every value of a conjunction of schemas keeps; there may be more.

    Attributes:
        schemas: the conjuncts.
        kinds: what it may be.
        values: what it may be if they are finitely many, by their canonical JSON.
        required: names of an object.
        properties: schemas of named properties, all of which hold.
        closed: names that an object may have, for each schema that forbids others.
        options: lists of schemas, of each of which one must match.
        patterns: expressions of texts, all of which match.
        first: schemas of an array's first item, all of which hold.
    """

    schemas: list[Any]
    kinds: frozenset[str] = KINDS
    values: dict[str, Any] | None = None
    required: set[str] = field(default_factory=set[str])
    properties: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    closed: list[frozenset[str]] = field(default_factory=list[frozenset[str]])
    options: list[list[Any]] = field(default_factory=list[list[Any]])
    patterns: list[str] = field(default_factory=list[str])
    first: list[Any] = field(default_factory=list[Any])

    def add(self, part: Any) -> None:
        if not is_object(part):
            self.kinds = self.kinds if part is True else frozenset()
            return
        if "type" in part:
            self.kinds &= kinds_of(part["type"])
        self._add_object(part)
        if isinstance(part.get("pattern"), str):
            self.patterns.append(part["pattern"])
        self.first += _first_items(part)
        for key in ("anyOf", "oneOf"):
            if is_list(part.get(key)):
                self.options.append(part[key])

    def add_values(self, own: dict[str, Any]) -> None:
        """Keep to values, by their canonical JSON."""
        both = self.values
        self.values = own if both is None else {key: both[key] for key in both if key in own}

    def _add_object(self, part: dict[str, Any]) -> None:
        required, properties = part.get("required"), part.get("properties")
        if is_text_list(required):
            self.required.update(required)
        named = properties if is_object(properties) else {}
        for name, schema in named.items():
            self.properties.setdefault(name, []).append(schema)
        if part.get("additionalProperties") is False and not part.get("patternProperties"):
            self.closed.append(frozenset(named))

    def forbids(self, name: str) -> bool:
        return False in self.properties.get(name, []) or any(
            name not in names for names in self.closed
        )

    def bounds(self, least: str, most: str) -> tuple[float, float]:
        lows = [_number(part, least) for part in self.schemas]
        highs = [_number(part, most) for part in self.schemas]
        return (
            max((low for low in lows if low is not None), default=0),
            min((high for high in highs if high is not None), default=math.inf),
        )

    def range(self) -> tuple[float, float]:
        """Return the least and the most of a number; exclusive ends are a float apart."""
        lows, highs = [-math.inf], [math.inf]
        for part in self.schemas:
            low, high = _number(part, "minimum"), _number(part, "maximum")
            above, below = _number(part, "exclusiveMinimum"), _number(part, "exclusiveMaximum")
            if is_object(part) and part.get("exclusiveMinimum") is True:
                above = low
            if is_object(part) and part.get("exclusiveMaximum") is True:
                below = high
            lows += [each for each in (low, _next(above, math.inf)) if each is not None]
            highs += [each for each in (high, _next(below, -math.inf)) if each is not None]
        return max(lows), min(highs)


def _first_items(part: dict[str, Any]) -> Iterator[Any]:
    items, prefix = part.get("items"), part.get("prefixItems")
    for each in (items, prefix):
        if is_list(each):
            yield from each[:1]
            return
    if items is not None:
        yield items


def _value_lists(part: Any) -> Iterator[list[Any]]:
    if is_object(part):
        if is_list(part.get("enum")):
            yield part["enum"]
        if "const" in part:
            yield [part["const"]]


def kinds_of(types: Any) -> frozenset[str]:
    """Return the kinds of values that ``type`` allows."""
    names = types if is_list(types) else [types]
    return frozenset(kind for name in names for kind in _kinds(name))


def _kinds(name: Any) -> Iterator[str]:
    if name == "number":
        yield from ("integer", "fraction")
    elif name in KINDS - {"fraction"}:
        yield name


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
        case list():
            return "array"
        case _:
            return "object"


def canonical(value: Any) -> str:
    """Return a value's JSON, the same for equal values such as 1 and 1.0."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if is_list(value):
        return [_whole(item) for item in value]
    return {key: _whole(item) for key, item in value.items()} if is_object(value) else value


def _number(part: Any, key: str) -> float | None:
    value = part.get(key) if is_object(part) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Beyond this, whole numbers are not floats of their own.
    return value if abs(value) < 2**53 else None


def _next(value: float | None, towards: float) -> float | None:
    return None if value is None else math.nextafter(value, towards)


def _without(part: Any, options: list[Any]) -> Any:
    """Return a conjunct without a list of alternatives."""
    if not is_object(part):
        return part
    return {key: value for key, value in part.items() if value is not options}
