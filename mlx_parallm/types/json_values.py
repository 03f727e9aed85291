"""Types of JSON values that were checked, and how many a text may have.

``json.loads`` returns Any. After ``isinstance(value, dict)`` alone the types of keys and values are
unknown to type checkers; after these checks they are str and Any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

# MAX_VALUES: objects and lists in a JSON text, and members of its objects. To read, check and free
# these many takes a tenth of a second, in which nothing else runs; 8 MiB could hold ten times as
# many.
MAX_VALUES = 2**18
# MAX_ENTRIES: numbers and texts in lists, as counted by commas.
MAX_ENTRIES = 2**21
TOO_MANY = (
    f"This has too many values: at most {MAX_VALUES} objects and lists, {MAX_VALUES} members "
    f"of objects, and {MAX_ENTRIES} entries of lists."
)


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


def may_have_too_many(raw: bytes | bytearray) -> bool:
    """True if a JSON text has more values than it may, or has such signs within its texts."""
    num_opened = raw.count(b"[") + raw.count(b"{")
    return max(num_opened, raw.count(b":")) > MAX_VALUES or raw.count(b",") > MAX_ENTRIES
