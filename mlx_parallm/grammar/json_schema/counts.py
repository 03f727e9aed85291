"""Bounds of an object's number of properties, where some of the named ones may be absent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from mlx_parallm.grammar.json_schema.keywords import Schema
from mlx_parallm.types.json_values import is_object, is_text_list

# MAX_SUBSETS of properties that are written out.
MAX_SUBSETS = 64


def counted(schema: Schema) -> list[Any]:
    """Remove the bounds that llguidance does not enforce, and return what an object must match.

    It enforces them if all named properties are required.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not is_object(properties) or not is_text_list(required):
        return []
    optional = [
        name for name, each in properties.items() if name not in required and each is not False
    ]
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if not optional or not all(
        _is_count(schema, key) for key in ("minProperties", "maxProperties")
    ):
        return []
    fixed = len(set(required))
    least, most = (
        schema.get("minProperties", 0) - fixed,
        schema.get("maxProperties", math.inf) - fixed,
    )
    if is_closed and most >= len(optional):
        schema.pop("maxProperties", None)
        most = math.inf
    if least <= 0:
        schema.pop("minProperties", None)
    wanted = _subsets(optional, least, most, fixed=fixed, is_closed=is_closed)
    if wanted is None or most < 0:
        return []
    schema.pop("minProperties", None)
    schema.pop("maxProperties", None)
    return wanted


def _subsets(
    optional: list[str], least: int, most: float, *, fixed: int, is_closed: bool
) -> list[Any] | None:
    """Return what to match besides; None if llguidance does it, or it would be too much.

    ``least`` and ``most`` count properties besides the ``fixed`` ones, which are required.
    """
    if least <= 0 and most == math.inf:
        return []
    if is_closed and most == math.inf:
        return _some(optional, least, _with)
    if is_closed and least <= 0:
        return _some(optional, len(optional) - int(most), _without)
    if most == math.inf and least == 1:
        named = [{"required": [name]} for name in optional]
        return [{"anyOf": [*named, _without(optional) | {"minProperties": fixed + 1}]}]
    return None


def _some(optional: list[str], count: int, make: Callable[[list[str]], Schema]) -> list[Any] | None:
    if not 0 < count <= len(optional) or math.comb(len(optional), count) > MAX_SUBSETS:
        return None
    return [{"anyOf": [make(list(names)) for names in itertools.combinations(optional, count)]}]


def _with(names: list[str]) -> Schema:
    return {"required": names}


def _without(names: list[str]) -> Schema:
    return {"properties": dict.fromkeys(names, False)}


def _is_count(schema: Schema, key: str) -> bool:
    value = schema.get(key, 0)
    return isinstance(value, int) and not isinstance(value, bool)
