"""The JSON value of a parameter written as plain text, decided by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

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
_DEEPEST = 8
# _LONGEST_LITERAL: longer Python literals stay text, because parsing them takes much memory.
_LONGEST_LITERAL = 20_000


def types_of(tool: Tool | None, parameter: str) -> frozenset[str] | None:
    """Return the JSON types that a parameter may have; None if the schema does not say."""
    if tool is None:
        return None
    properties = tool.parameters.get("properties")
    if not is_mapping(properties) or parameter not in properties:
        return None
    return _types(properties[parameter], tool.parameters, _DEEPEST) or None


def json_text(text: str, types: frozenset[str] | None) -> str:
    """Return a value's text as JSON: a value of one of the types if possible, else a string.

    Other types are tried before strings, so ``5`` is a number if both are allowed.
    """
    try:
        value = _read(text.strip())
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


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not is_mapping(schema) or not depth:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if is_list(named):
        return frozenset(name for name in named if isinstance(name, str))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return frozenset(map(_kind, values if is_list(values) else []))
    options = [_resolve(schema.get("$ref"), root)]
    for key in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(key)
        options += listed if is_list(listed) else []
    return frozenset[str]().union(*(_types(option, root, depth - 1) for option in options))


def _resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node: Any = root
    for name in reference[2:].split("/"):
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
