"""A JSON schema as a document: its draft, and where its references lead."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from mlx_parallm.grammar.json_schema.keywords import Schema, children
from mlx_parallm.grammar.json_schema.well_formed import is_well_formed
from mlx_parallm.grammar.json_schema.work import Work
from mlx_parallm.types.json_values import is_list, is_object

OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
# MAX_VISITED: schemas that are visited to find recursive references.
MAX_VISITED = 100_000
# MAX_CONJUNCTS: schemas that a value must match together, with those of references.
MAX_CONJUNCTS = 64


class Document:
    """Finds the schemas that references lead to, within one document.

    Attributes:
        root: the whole schema.
        is_old: True if its draft ignores what stands beside ``$ref``.
        is_well_formed: True if its keywords have values of their types. The schemas of references
            always do.
        work: counts what is done for it.
    """

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.work = Work()
        self.is_old = any(draft in str(root.get("$schema")) for draft in OLD_DRAFTS)
        self._known: set[int] = set()
        self.is_well_formed = is_well_formed(root, self._known)
        self._resolves = not self._has_other_bases()
        self._recursive: dict[str, bool] = {}
        self._num_visited = 0

    def target(self, reference: Any) -> Any:
        """Return the well-formed schema of a reference; None if it leads to none in here."""
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
        is_schema = is_object(value) or isinstance(value, bool)
        # A pointer may lead to where no schema is expected.
        return value if is_schema and is_well_formed(value, self._known) else None

    def is_recursive(self, reference: str) -> bool:
        """True if a reference leads to a schema that contains the same reference."""
        if reference not in self._recursive:
            seen: set[str] = set()
            self._collect(self.target(reference), seen)
            self._recursive[reference] = reference in seen
        return self._recursive[reference]

    def conjuncts(self, schema: Any) -> list[Any]:
        """Return schemas without ``$ref`` and ``allOf`` that a value must match together.

        Unless ``is_whole`` there are fewer, so a value that matches all of them may still not match
        the schema.
        """
        return self._conjunction(schema)[0]

    def is_whole(self, schema: Any) -> bool:
        """True if ``conjuncts`` returns all that a value must match."""
        return self._conjunction(schema)[1]

    def _conjunction(self, schema: Any) -> tuple[list[Any], bool]:
        parts: list[Any] = []
        waiting, seen = [schema], set[str]()
        is_whole = True
        while waiting and len(parts) < MAX_CONJUNCTS:
            item = waiting.pop()
            self.work.spend(4 + (len(item) if is_object(item) else 0))
            if not is_object(item):
                parts.append(item)
                continue
            reference = item.get("$ref")
            if isinstance(reference, str):
                target = self.target(reference)
                is_whole = is_whole and target is not None
                if target is not None and reference not in seen:
                    seen.add(reference)
                    waiting.append(target)
                if self.is_old:
                    continue
            members = item.get("allOf")
            waiting.extend(reversed(members) if is_list(members) else ())
            parts.append({key: each for key, each in item.items() if key not in ("$ref", "allOf")})
        return parts, is_whole and not waiting

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
