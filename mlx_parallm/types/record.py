"""A decorator for dataclasses that every step creates once or more per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[T]) -> type[T]:
    """Return ``cls`` as a dataclass that type checkers treat as immutable.

    Python does not enforce it: creating a frozen dataclass takes twice as long.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)
