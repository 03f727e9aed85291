"""Sequences whose elements are made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class LazySequence(Sequence[T], Generic[T]):
    """``length`` elements, each made once; what is never looked at costs nothing.

    A request of many samples may be refused, or wait long, before any of them begins.
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length = length
        self._make = make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if index in self._made:
            return self._made[index]
        place = range(self._length)[index]
        if place not in self._made:
            self._made[place] = self._make(place)
        return self._made[place]
