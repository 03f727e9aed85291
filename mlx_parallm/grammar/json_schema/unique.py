"""Arrays without repeated items, where there are few of them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

from mlx_parallm.grammar.json_schema.disjoint import canonical
from mlx_parallm.grammar.json_schema.document import Document
from mlx_parallm.grammar.json_schema.keywords import Schema
from mlx_parallm.types.json_values import is_list, is_object

# MAX_ARRAYS that are written out, and MAX_CHARS of all their items.
MAX_ARRAYS = 2_000
MAX_CHARS = 400_000


def unique_arrays(schema: Schema, document: Document) -> list[Any] | None:
    """Return what an array must match besides the schema so that no item comes twice.

    None: its items are not from a finite list, or there are too many arrays of them.
    """
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if most in (0, 1):
        return []
    values = _values(schema.get("items"), document)
    if values is None or "prefixItems" in schema or not isinstance(least, int):
        return None
    most = int(min(most, len(values)))
    document.work.spend(4 * len(values))
    if MAX_ARRAYS * len(json.dumps(values)) > MAX_CHARS:
        return None
    for choose in (itertools.permutations, itertools.combinations):
        count = math.perm if choose is itertools.permutations else math.comb
        if sum(count(len(values), length) for length in range(least, most + 1)) <= MAX_ARRAYS:
            lengths = range(least, most + 1)
            arrays = [list(each) for length in lengths for each in choose(values, length)]
            document.work.spend(len(arrays) + sum(map(len, arrays)) // 8)
            return [{"anyOf": [{"type": _OTHERS}, {"enum": arrays}]}] if arrays else [False]
    return None


_OTHERS = ["null", "boolean", "number", "string", "object"]


def _values(items: Any, document: Document) -> list[Any] | None:
    """Return the values that each item is one of; None if they are not known."""
    common: dict[str, Any] | None = None
    for part in document.conjuncts(items) if is_object(items) else ():
        for own in _lists(part):
            values = {canonical(value): value for value in own}
            both = values if common is None else common
            common = {key: both[key] for key in both if key in values}
    return None if common is None else list(common.values())


def _lists(part: Any) -> Iterator[list[Any]]:
    if is_object(part):
        if is_list(part.get("enum")):
            yield part["enum"]
        if "const" in part:
            yield [part["const"]]
        if part.get("type") == "boolean":
            yield [False, True]
