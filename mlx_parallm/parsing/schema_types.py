"""The JSON value of a parameter written as plain text, decided by the tool's schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from mlx_parallm.parsing.formats import Tool
from mlx_parallm.parsing.json_text import encode
from mlx_parallm.types.json_values import is_list, is_mapping, is_sequence

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (Mapping, "object"),
    (list, "array"),
)
# _LITERALS: the Python literals that are taken if a text is not JSON.
_LITERALS: tuple[type[Any], ...] = (dict, list, tuple, str)
# _SPELLED: names of types that clients write although JSON Schema has others.
_SPELLED = {
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "str": "string",
    "dict": "object",
    "list": "array",
}
_DEEPEST = 8
# _DIGITS: an integer, which JSON lacks if it begins with zeros. Python converts 4,300 digits.
_DIGITS = re.compile(r"-?[0-9]{1,4000}")
# _LONGEST_LITERAL: longer Python literals stay text, because parsing them takes much memory.
_LONGEST_LITERAL = 20_000


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """A JSON schema with the schema whose definitions it refers to; None: anything.

    ``$ref``, ``allOf``, ``anyOf`` and ``oneOf`` are resolved.
    """

    schema: Any
    root: Any

    @property
    def types(self) -> frozenset[str] | None:
        """The JSON types that a value may have; None if the schema does not say."""
        return _types(self.schema, self.root, _DEEPEST) or None

    @property
    def names(self) -> frozenset[str]:
        """The names of the properties that the schema declares."""
        return frozenset(name for node in self._objects() for name in node["properties"])

    def member(self, name: str) -> SchemaNode:
        """Return the schema of a property."""
        declared = [
            node["properties"][name] for node in self._objects() if name in node["properties"]
        ]
        declared = declared or [part.get("additionalProperties") for part in self._parts()]
        return self._either(declared)

    def item(self) -> SchemaNode:
        """Return the schema of an array's items."""
        return self._either([part.get("items") for part in self._parts()])

    def _objects(self) -> Iterator[Mapping[str, Any]]:
        return (part for part in self._parts() if is_mapping(part.get("properties")))

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        return _parts(self.schema, self.root, _DEEPEST)

    def _either(self, schemas: list[Any]) -> SchemaNode:
        known = [schema for schema in schemas if is_mapping(schema)]
        return SchemaNode(known[0] if len(known) == 1 else {"anyOf": known}, self.root)


def parameters_of(tool: Tool | None) -> SchemaNode:
    """Return the schema of a tool's arguments; None: anything."""
    schema = None if tool is None else tool.parameters
    return SchemaNode(schema, schema)


def json_text(text: str, types: frozenset[str] | None) -> str:
    """Return a value's text as JSON: a value of one of the types if possible, else a string.

    Other types are tried before strings, so ``5`` is a number if both are allowed.
    """
    try:
        stripped = text.strip()
        is_number = types is not None and not types.isdisjoint({"integer", "number"})
        value = int(stripped) if is_number and _DIGITS.fullmatch(stripped) else _read(stripped)
        if isinstance(value, float) and value.is_integer() and not _allows(types, "number"):
            value = int(value)
        return encode(value if _allows(types, _kind(value)) else text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return encode(text)


def _allows(types: frozenset[str] | None, kind: str) -> bool:
    """True if a literal of that kind is allowed; a quoted string counts as plain text instead."""
    if types is None:
        return True
    if kind == "string":
        return False
    return kind in types or (kind == "integer" and "number" in types)


def _parts(schema: Any, root: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and those that it is composed of."""
    if not is_mapping(schema) or not depth:
        return
    yield schema
    for part in (*_all_of(schema, root), *_any_of(schema)):
        yield from _parts(part, root, depth - 1)


def _all_of(schema: Mapping[str, Any], root: Any) -> list[Any]:
    listed = schema.get("allOf")
    return [_resolve(schema.get("$ref"), root), *(listed if is_list(listed) else [])]


def _any_of(schema: Mapping[str, Any]) -> list[Any]:
    lists = (schema.get(key) for key in ("anyOf", "oneOf"))
    return [option for listed in lists if is_list(listed) for option in listed]


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    """Return the types that a schema allows; none if it does not say."""
    if not is_mapping(schema) or not depth:
        return frozenset()
    options = (_types(part, root, depth - 1) for part in _any_of(schema))
    parts = [_types(part, root, depth - 1) for part in _all_of(schema, root)]
    types = _own_types(schema)
    for more in (*parts, frozenset[str]().union(*options)):
        # A schema without a valid value has the types of all its parts.
        types = (types & more or _narrower(types, more) or types | more) if types else more
    return types


def _narrower(types: frozenset[str], more: frozenset[str]) -> frozenset[str]:
    """Return the integers of which one schema allows all numbers; none otherwise."""
    return frozenset(["integer"]) if {"integer", "number"} <= types | more else frozenset()


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([_SPELLED.get(named, named)])
    if is_list(named):
        return frozenset(_SPELLED.get(name, name) for name in named if isinstance(name, str))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return frozenset(map(_kind, values if is_list(values) else []))
    implied = {"properties": "object", "additionalProperties": "object", "items": "array"}
    return frozenset(kind for key, kind in implied.items() if is_mapping(schema.get(key)))


def _resolve(reference: Any, root: Any) -> Any:
    """Return what a reference within the schema points to (RFC 6901); None if there is nothing."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    node: Any = root
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if is_list(node) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            node = node.get(name) if is_mapping(node) else None
    return node


def _read(text: str) -> Any:
    """Return the value of a JSON text or Python literal.

    Raises:
        ValueError: it is neither, or JSON cannot represent the value. ``ast.literal_eval`` may
            raise other errors.
    """
    value: Any
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if len(text) > _LONGEST_LITERAL:
            raise
        value = ast.literal_eval(text)
        if not isinstance(value, _LITERALS):
            raise
    json.dumps(value, allow_nan=False)
    return list(value) if is_sequence(value) else value


def _kind(value: Any) -> str:
    """Return the JSON type of a value that ``json`` has read."""
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null")
