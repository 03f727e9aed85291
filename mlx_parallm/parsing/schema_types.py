"""What a parameter written as plain text means, by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from mlx_parallm.parsing.formats import Tool
from mlx_parallm.parsing.json_text import encode

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (Mapping, "object"),
    (list, "array"),
)
_DEEPEST = 8
# Longer Python literals are left as text: parsing them takes much memory.
_LONGEST_LITERAL = 20_000


def types_of(tool: Tool | None, parameter: str) -> frozenset[str] | None:
    """The JSON types that a parameter may have; None where the schema does not say."""
    if tool is None:
        return None
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping) or parameter not in properties:
        return None
    return _types(properties[parameter], tool.parameters, _DEEPEST) or None


def json_text(text: str, types: frozenset[str] | None) -> str:
    """A value's text as JSON: of one of the types if it can be, else a string.

    Types are tried before text, so ``5`` is a number where both are allowed.
    """
    try:
        value = _read(text.strip())
        if isinstance(value, float) and value.is_integer() and not _allows(types, "number"):
            value = int(value)
        return encode(value if _allows(types, _kind(value)) else text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return encode(text)


def _allows(types: frozenset[str] | None, kind: str) -> bool:
    """Whether a literal of that kind is meant; quotes belong to a text that may be one."""
    if types is None:
        return True
    if kind == "string":
        return False
    return kind in types or (kind == "integer" and "number" in types)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return frozenset(map(_kind, values if isinstance(values, list) else []))
    options = [_resolve(schema.get("$ref"), root)]
    for key in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(key)
        options += listed if isinstance(listed, list) else []
    return frozenset().union(*(_types(option, root, depth - 1) for option in options))


def _resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _read(text: str) -> Any:
    """What a text says in JSON or else in Python.

    Raises:
        ValueError: neither, or what JSON cannot say; other errors of both readers likewise.
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
        if not isinstance(value, (dict, list, tuple, str)):
            raise
    json.dumps(value, allow_nan=False)
    return list(value) if isinstance(value, tuple) else value


def _kind(value: Any) -> str:
    """The JSON type of a value that ``json`` has read."""
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null")
