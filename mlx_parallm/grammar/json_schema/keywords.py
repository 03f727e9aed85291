"""Keywords of JSON schemas: which hold schemas, and which restrict nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_parallm.types.json_values import is_list, is_object

Schema = dict[str, Any]

# MAPS, LISTS and SINGLES: keywords with schemas by name, in order, and alone.
MAPS = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
SINGLES = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
#: ``ANNOTATIONS``: keywords that restrict nothing.
ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding"}
    | {"contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description"}
    | {"examples", "format", "id", "readOnly", "title", "writeOnly", "x-guidance"}
)


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keywords and schemas that stand in a schema, one level down."""
    if not is_object(schema):
        return
    for key, value in schema.items():
        if key in MAPS or (key == "dependencies" and is_object(value)):
            parts = value.values() if is_object(value) else ()
        elif key in LISTS or (key == "items" and is_list(value)):
            parts = value if is_list(value) else ()
        else:
            parts = [value] if key in SINGLES else ()
        yield from ((key, part) for part in parts if is_object(part) or isinstance(part, bool))


def restricts(keywords: Iterable[str]) -> bool:
    """True if there are keywords besides annotations."""
    return not ANNOTATIONS.issuperset(keywords)
