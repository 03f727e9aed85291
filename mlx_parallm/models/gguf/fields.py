"""Typed access to the metadata of a GGUF file, whose values may have any type."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import cast

from mlx_parallm.models.gguf.header import GgufHeader
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_list

#: ``MAX_SIZE``: largest size of a layer, number of layers, or length of a context.
MAX_SIZE = 1 << 31


# MAX_SHOWN: longest text of a file in a message.
MAX_SHOWN = 80


def shown(text: str) -> str:
    """Return the beginning of a file's text as a message may have it."""
    return repr(text[:MAX_SHOWN])


class Fields:
    """The metadata of a file; keys of its architecture are named without it, as ``.block_count``.

    Its methods raise ModelLoadError, which names the key, for values of another kind.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a bool."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "a bool")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number; one of all layers may be a list of equal ones."""
        value = self._value(key, default)
        if isinstance(value, array) and len(every := set(cast("array[float]", value))) == 1:
            value = every.pop()
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_SIZE:
            raise self.wrong(key, "a positive whole number that is the same for all layers")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._value(key, default)
        if type(value) not in (int, float):
            raise self.wrong(key, "a positive number")
        number = float(cast("int | float", value))
        if not math.isfinite(number) or number <= 0:
            raise self.wrong(key, "a positive number")
        return number

    def strings(self, key: str) -> list[str]:
        """Return a list of strings."""
        value = self._value(key, None)
        if not is_list(value):
            raise self.wrong(key, "a list of strings")
        return value

    def numbers(self, key: str, count: int, forms: str) -> Sequence[float]:
        """Return an array of ``count`` numbers of one of the formats of ``array``."""
        value = self._value(key, None)
        numbers = cast("array[float]", value) if isinstance(value, array) else None
        if numbers is None or numbers.typecode not in forms or len(numbers) != count:
            raise self.wrong(key, f"an array of {count} numbers, one for each token")
        return numbers

    def has(self, key: str) -> bool:
        """True if the file has a key."""
        return self._full(key) in self.header.values

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        """Return the error of a value that is not what is expected."""
        if not self.has(key):
            return ModelLoadError(f"{self.header.path} has no {self._full(key)}.")
        return ModelLoadError(f"{self.header.path}: {self._full(key)} must be {expected}.")

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def _value(self, key: str, default: object) -> object:
        return self.header.values.get(self._full(key), default)
