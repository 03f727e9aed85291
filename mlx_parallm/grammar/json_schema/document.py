"""A JSON schema as a document: its draft, and where its references lead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

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
OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
# MAX_VISITED: schemas that are visited to find recursive references.
MAX_VISITED = 100_000
# MAX_CONJUNCTS: schemas that a value must match together, with those of references.
MAX_CONJUNCTS = 64


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


class Document:
    """Finds the schemas that references lead to, within one document.

    Attributes:
        root: the whole schema.
        is_old: True if its draft ignores what stands beside ``$ref``.
    """

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.is_old = any(draft in str(root.get("$schema")) for draft in OLD_DRAFTS)
        self._resolves = not self._has_other_bases()
        self._recursive: dict[str, bool] = {}
        self._num_visited = 0

    def target(self, reference: Any) -> Any:
        """Return the schema of a reference; None if it is no pointer within this document."""
        if not isinstance(reference, str) or not self._resolves:
            return None
        if reference != "#" and not reference.startswith("#/"):
            return None
        value: Any = self.root
        for part in unquote(reference).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if is_object(value) and key in value:
                value = value[key]
            elif is_list(value) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return value if is_object(value) or isinstance(value, bool) else None

    def is_recursive(self, reference: str) -> bool:
        """True if a reference leads to a schema that contains the same reference."""
        if reference not in self._recursive:
            seen: set[str] = set()
            self._collect(self.target(reference), seen)
            self._recursive[reference] = reference in seen
        return self._recursive[reference]

    def conjuncts(self, schema: Any) -> list[Any]:
        """Return schemas without ``$ref`` and ``allOf`` that a value must match together.

        Where a reference cannot be followed there are fewer, so a value that matches all of them
        may still not match the schema.
        """
        parts: list[Any] = []
        waiting, seen = [schema], set[str]()
        while waiting and len(parts) < MAX_CONJUNCTS:
            item = waiting.pop()
            if not is_object(item):
                parts.append(item)
                continue
            reference = item.get("$ref")
            if isinstance(reference, str):
                target = self.target(reference)
                if target is not None and reference not in seen:
                    seen.add(reference)
                    waiting.append(target)
                if self.is_old:
                    continue
            members = item.get("allOf")
            waiting.extend(reversed(members) if is_list(members) else ())
            parts.append({key: each for key, each in item.items() if key not in ("$ref", "allOf")})
        return parts

    def _collect(self, schema: Any, seen: set[str]) -> None:
        """Add every reference in a schema, and in those that they lead to."""
        waiting = [schema]
        while waiting and self._num_visited < MAX_VISITED:
            self._num_visited += 1
            item = waiting.pop()
            waiting.extend(
                child for key, child in children(item) if key not in ("$defs", "definitions")
            )
            reference = item.get("$ref") if is_object(item) else None
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                waiting.append(self.target(reference))

    def _has_other_bases(self) -> bool:
        """True if a schema within has an id, to which its references would be relative."""
        waiting = [child for _, child in children(self.root)]
        while waiting:
            item = waiting.pop()
            names = [item.get(key) for key in ("$id", "id")] if is_object(item) else []
            if any(isinstance(name, str) and not name.startswith("#") for name in names):
                return True
            waiting.extend(child for _, child in children(item))
        return False


def restricts(keywords: Iterable[str]) -> bool:
    """True if there are keywords besides annotations."""
    return not ANNOTATIONS.issuperset(keywords)
