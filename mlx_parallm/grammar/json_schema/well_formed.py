"""Checks that the keywords of a JSON schema have values of their types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.grammar.json_schema.keywords import LISTS, MAPS, SINGLES, children
from mlx_parallm.types.json_values import is_list, is_object, is_text_list

# MAX_COUNT of items, characters and properties: all whole numbers up to it are floats too.
MAX_COUNT = 2**53


def is_well_formed(schema: Any, known: set[int]) -> bool:
    """True if all keywords in a schema, and in the schemas within it, have values of their types.

    Args:
        schema: the schema.
        known: identities of schemas that are well-formed; those that are checked are added.
    """
    waiting, checked = [schema], set[int]()
    while waiting:
        item = waiting.pop()
        if not is_object(item) or id(item) in known or id(item) in checked:
            continue
        checked.add(id(item))
        if not all(TYPES[key](value) for key, value in item.items() if key in TYPES):
            return False
        waiting.extend(child for _, child in children(item))
    known |= checked
    return True


def _is_schema(value: Any) -> bool:
    return is_object(value) or isinstance(value, bool)


def _is_schema_list(value: Any) -> bool:
    return is_list(value) and all(map(_is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return is_object(value) and all(map(_is_schema, value.values()))


def _is_items(value: Any) -> bool:
    return _is_schema(value) or _is_schema_list(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) or is_text_list(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bound(value: Any) -> bool:
    """True if it is a number, or the flag of draft 4."""
    return isinstance(value, int | float)


def _is_dependencies(value: Any) -> bool:
    return is_object(value) and all(
        _is_schema(each) or is_text_list(each) for each in value.values()
    )


def _is_text_lists(value: Any) -> bool:
    return is_object(value) and all(map(is_text_list, value.values()))


#: ``TYPES``: by keyword, what is true of a value of its type.
TYPES: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(MAPS, _is_schema_map),
    **dict.fromkeys(LISTS, _is_schema_list),
    **dict.fromkeys(SINGLES, _is_schema),
    **dict.fromkeys(("$ref", "format", "pattern"), _is_text),
    **dict.fromkeys(("minItems", "minLength", "minProperties"), _is_count),
    **dict.fromkeys(("maxItems", "maxLength", "maxProperties"), _is_count),
    **dict.fromkeys(("maximum", "minimum", "multipleOf"), _is_number),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _is_bound),
    "dependencies": _is_dependencies,
    "dependentRequired": _is_text_lists,
    "enum": is_list,
    "items": _is_items,
    "required": is_text_list,
    "type": _is_type,
    "uniqueItems": _is_flag,
}
