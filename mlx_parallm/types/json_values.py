"""Types of JSON values that were checked.

``json.loads`` returns Any. After ``isinstance(value, dict)`` alone the types of keys and values are
unknown to type checkers; after these checks they are str and Any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """True if a JSON value is an object."""
    return isinstance(value, dict)


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """True if a value is an object in any implementation, such as one that cannot change."""
    return isinstance(value, Mapping)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """True if a JSON value is a list."""
    return isinstance(value, list)


def is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """True if a value is a list or a tuple; a text is neither."""
    return isinstance(value, list | tuple)


def is_text_list(value: Any) -> TypeGuard[list[str]]:
    """True if a JSON value is a list of texts; it may be empty."""
    return is_list(value) and all(isinstance(item, str) for item in value)
