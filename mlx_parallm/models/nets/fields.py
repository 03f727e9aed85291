"""Typed reading of the fields of a net's ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_list, is_object

#: ``MAX_SIZE``: the largest whole number in a field.
MAX_SIZE = 1 << 30
#: ``MAX_NAME_CHARS``: the longest name of a tensor or layer.
MAX_NAME_CHARS = 256
#: ``MAX_LIST``: the most names, sizes or bounds in a list.
MAX_LIST = 65_536

_REQUIRED: Any = object()


class Fields:
    """Fields of one JSON object, each read once.

    Attributes:
        where: the object's name in messages, like "layer 'pi.0'".
        kind: the type that a layer's object says, once that was read.
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.kind = ""
        self._content = dict(content)

    def refuse(self, text: str) -> NoReturn:
        """Raise ModelLoadError, which names the object."""
        raise ModelLoadError(f"config.json: {self.where}: {text}")

    def end(self) -> None:
        """Refuse fields that nothing has read.

        Raises:
            ModelLoadError: there are some.
        """
        if self._content:
            names = ", ".join(sorted(self._content)[:3])
            self.refuse(f"unknown fields: {names[:MAX_NAME_CHARS]}")

    def has(self, name: str) -> bool:
        """Return True if a field is there and was not read yet."""
        return self._content.get(name) is not None

    def value(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field of any type."""
        value = self._content.pop(name, None)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.refuse(f"{name} is missing")
        return default

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """Return a text that has at least one character, and not too many."""
        return self._text(name, self.value(name, default))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        return tuple(self._text(name, item) for item in self._list(name, self.value(name)))

    def size(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """Return a whole number of at least ``least``."""
        return self._size(name, self.value(name, default), least)

    def sizes(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> tuple[int, ...]:
        """Return a list of whole numbers; a number alone is a list of one."""
        value = self.value(name, default)
        items = [value] if isinstance(value, int) else self._list(name, value)
        return tuple(self._size(name, item, least) for item in items)

    def pair(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> tuple[int, int]:
        """Return two whole numbers; a number alone counts twice."""
        sizes = self.sizes(name, default, least=least)
        if len(sizes) not in (1, 2):
            self.refuse(f"{name} must be a whole number, or two")
        return sizes[0], sizes[-1]

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.value(name, default)
        if not isinstance(value, bool):
            self.refuse(f"{name} must be true or false")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a finite number."""
        value = self._number(name, self.value(name, default))
        if not math.isfinite(value):
            self.refuse(f"{name} must be finite")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers, which may be infinite but not NaN."""
        return tuple(self._number(name, item) for item in self._list(name, self.value(name)))

    def objects(self, name: str, what: str, most: int) -> list[Fields]:
        """Return a list of objects, at least one; ``what`` says what each is."""
        items = self._list(name, self.value(name), most)
        if not items:
            self.refuse(f"{name} is empty")
        return [self._object(item, f"{what} {place}") for place, item in enumerate(items)]

    def object(self, name: str) -> Fields:
        """Return an object."""
        return self._object(self.value(name), f"{self.where}: {name}")

    def _object(self, value: Any, where: str) -> Fields:
        if not is_object(value):
            raise ModelLoadError(f"config.json: {where} must be an object")
        return Fields(value, where)

    def _list(self, name: str, value: Any, most: int = MAX_LIST) -> Sequence[Any]:
        if not is_list(value):
            self.refuse(f"{name} must be a list")
        if len(value) > most:
            self.refuse(f"{name} has {len(value)} entries; at most {most} are allowed")
        return value

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
            self.refuse(f"{name} must be a text of 1 to {MAX_NAME_CHARS} characters")
        return value

    def _size(self, name: str, value: Any, least: int) -> int:
        if type(value) is not int or not least <= value <= MAX_SIZE:
            self.refuse(f"{name} must be a whole number from {least} to {MAX_SIZE}")
        return value

    def _number(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value != value or (abs(value) > 1e300 and not math.isinf(value)):
            self.refuse(f"{name} must be a number")
        return float(value)
