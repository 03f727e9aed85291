"""Rewrites a JSON schema so that llguidance enforces more of it.

Every value that the result accepts is one that the schema accepts. What cannot be rewritten stays
as it is: llguidance refuses it, or leaves it out where it is lenient.
"""

from __future__ import annotations

import json
from typing import Any

from mlx_parallm.grammar.json_schema.disjoint import kinds_of
from mlx_parallm.grammar.json_schema.document import Document
from mlx_parallm.grammar.json_schema.keywords import (
    LISTS,
    MAPS,
    SINGLES,
    Schema,
    children,
    restricts,
)
from mlx_parallm.grammar.json_schema.rules import Rules
from mlx_parallm.grammar.json_schema.work import TooMuchWorkError
from mlx_parallm.grammar.spec import is_longer
from mlx_parallm.types.json_values import is_list, is_object

# MAX_SCHEMAS that a document may have, and that may be written for it.
MAX_SCHEMAS = 20_000
# MAX_CHARS of the result.
MAX_CHARS = 1 << 20
# REWRITTEN: keywords that llguidance does not enforce as they stand.
REWRITTEN = frozenset(
    {"$ref", "dependencies", "dependentRequired", "dependentSchemas", "else", "format", "if"}
    | {"maxProperties", "minProperties", "not", "oneOf", "propertyNames", "then", "uniqueItems"}
)


def rewritten(schema: Schema, *, lenient: bool = False) -> Schema:
    """Return the schema with keywords that llguidance enforces, where that is possible.

    Args:
        schema: the schema.
        lenient: True if it may stay as it is where that is too much work.

    Raises:
        TooMuchWorkError: it is too large, and not lenient.
    """
    if not _needs(schema):
        return schema
    document = Document(schema)
    # What is malformed is refused by llguidance, which says where it is.
    if not document.is_well_formed:
        return schema
    try:
        result = _Rewriter(document).whole()
    except (_TooLargeError, RecursionError):
        return schema
    except TooMuchWorkError:
        if lenient:
            return schema
        raise
    return schema if is_longer(result, MAX_CHARS) else result


class _TooLargeError(Exception):
    """The document would become too large."""


def _needs(schema: Schema) -> bool:
    """True if a schema has keywords to rewrite, and is not too large for that."""
    waiting: list[Any] = [schema]
    count, needs = 0, False
    while waiting and count <= MAX_SCHEMAS:
        item = waiting.pop()
        count += 1
        needs = needs or (is_object(item) and not REWRITTEN.isdisjoint(item))
        waiting.extend(child for _, child in children(item))
    return needs and count <= MAX_SCHEMAS


class _Rewriter:
    """Writes one document anew, with definitions of its own."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._rules = Rules(document)
        # Names of definitions by what they define, and those that are not written yet.
        self._names: dict[str, str] = {}
        self._waiting: list[tuple[str, Any]] = []
        self._count = 0
        # True if a reference leads to where this cannot follow.
        self._has_unknown = False

    def whole(self) -> Schema:
        """Return the whole document."""
        root = self._document.root
        body = self._schema(root)
        kept = {key: root[key] for key in ("$schema", "$id", "id", "x-guidance") if key in root}
        if self._has_unknown:
            for key in ("definitions", "$defs"):
                own = root.get(key)
                if is_object(own):
                    kept[key] = {name: self._schema(each) for name, each in own.items()}
        definitions: dict[str, Any] = {}
        while self._waiting:
            name, schema = self._waiting.pop()
            definitions[name] = self._schema(schema, is_definition=True)
        return kept | body | {"$defs": kept.get("$defs", {}) | definitions}

    def _schema(self, schema: Any, *, is_definition: bool = False) -> Any:
        """Return a schema whose keywords are rewritten."""
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise _TooLargeError
        if not is_object(schema):
            return schema
        self._document.work.spend(4 + len(schema))
        plain = self._plain(schema)
        if not is_definition and self._joins_itself(plain):
            key = json.dumps(plain)
            self._document.work.spend(len(key) // 64)
            return self._defined(key, plain)
        return self._descend(self._joined(plain))

    def _plain(self, schema: Schema) -> Schema:
        """Return a schema without the keywords to rewrite, besides references.

        What they become stands in the place of the first, because the order of keywords is that
        of properties.
        """
        left = {key: each for key, each in schema.items() if key not in ("$defs", "definitions")}
        plain: Schema = {}
        members: list[Any] = []
        for key in list(left):
            more: list[Any] = []
            if key in self._rules.by_keyword and key in left:
                self._document.work.keyword = key
                more = self._rules.by_keyword[key](left)
            elif key == "allOf" and is_list(left[key]):
                more = left.pop(key)
            if more:
                plain["allOf"] = members
                members += more
            if key in left:
                plain[key] = left[key]
        return {key: each for key, each in plain.items() if key in left or key == "allOf"}

    def _joins_itself(self, plain: Schema) -> bool:
        """True if a value must match a recursive reference together with something else."""
        parts = self._conjunction(plain)
        is_alone = len(parts) == 1 and parts[0] == plain
        return not is_alone and any(map(self._is_recursive, parts))

    def _joined(self, plain: Schema) -> Schema:
        """Return a schema with what recursive references lead to in their place."""
        if not self._joins_itself(plain):
            return plain
        parts = self._conjunction(plain)
        if len(parts) == 1:
            return parts[0]
        for number, part in enumerate(parts):
            if is_object(part) and "anyOf" in part and self._is_recursive(part):
                before, after = parts[:number], parts[number + 1 :]
                self._document.work.spend(len(parts) * len(part["anyOf"]))
                return {"anyOf": [{"allOf": [*before, each, *after]} for each in part["anyOf"]]}
        return {"allOf": [self._inlined(part) for part in parts]}

    def _conjunction(self, plain: Schema) -> list[Any]:
        """Return the schemas that a value must match together, recursive ones by themselves."""
        members = plain.get("allOf")
        parts = list(members) if is_list(members) else []
        rest = {key: each for key, each in plain.items() if key != "allOf"}
        for key in ("anyOf", "$ref"):
            if key in rest and self._is_recursive({key: rest[key]}):
                parts.insert(0, {key: rest.pop(key)})
        if restricts(rest) and not self._is_implied(rest, parts):
            parts.insert(0, rest)
        return parts

    def _is_implied(self, rest: Schema, parts: list[Any]) -> bool:
        """True if a type says no more than the other parts do."""
        if not restricts(key for key in rest if key != "type"):
            kinds = kinds_of(rest.get("type"))
            return any(self._rules.disjoint.kinds(part) <= kinds for part in parts)
        return False

    def _is_recursive(self, part: Any) -> bool:
        """True if a schema is a recursive reference, or a choice with one."""
        if not is_object(part) or len(part) != 1:
            return False
        options = part.get("anyOf")
        return self._inlined(part) is not part or (
            is_list(options) and any(map(self._is_recursive, options))
        )

    def _inlined(self, part: Any) -> Any:
        reference = part.get("$ref") if is_object(part) and len(part) == 1 else None
        if not isinstance(reference, str) or not self._document.is_recursive(reference):
            return part
        return self._document.target(reference)

    def _descend(self, schema: Schema) -> Schema:
        """Return a schema with all schemas within it rewritten."""
        result: Schema = {}
        for key, value in schema.items():
            if key in MAPS and is_object(value):
                result[key] = {name: self._schema(each) for name, each in value.items()}
            elif (key in LISTS or key == "items") and is_list(value):
                result[key] = [self._schema(each) for each in value]
            elif key in SINGLES:
                result[key] = self._schema(value)
            elif key == "$ref":
                result |= self._reference(value)
            else:
                result[key] = value
        return result

    def _reference(self, reference: Any) -> Schema:
        target = self._document.target(reference)
        if target is None:
            self._has_unknown = True
            return {"$ref": reference}
        return self._defined(reference, target)

    def _defined(self, key: str, schema: Any) -> Schema:
        """Return a reference to the definition of a schema, which is written once."""
        if key not in self._names:
            self._names[key] = name = f"rewritten-{len(self._names)}"
            self._waiting.append((name, schema))
        return {"$ref": f"#/$defs/{self._names[key]}"}
