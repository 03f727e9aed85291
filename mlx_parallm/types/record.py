"""Dataclasses of which a step makes one or more for every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[T]) -> type[T]:
    """Make a dataclass that nobody may change, which type checkers see to.

    Not so the interpreter: to freeze an object takes twice as long as to make it.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)
