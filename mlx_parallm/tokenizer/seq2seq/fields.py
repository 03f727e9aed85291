"""Checked fields of a folder's JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_list, is_object


class Fields:
    """The fields of a JSON object in a file. A field that is null counts as absent."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self._file = file
        self.values = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def read(cls, file: Path) -> Fields | None:
        """Return the fields of a file; None if there is no such file.

        Raises:
            ModelLoadError: it is not a JSON object.
        """
        if not file.exists():
            return None
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelLoadError(f"{file} is not JSON: {error}") from error
        if not is_object(values):
            raise ModelLoadError(f"{file} must be a JSON object.")
        return cls(file, values)

    def part(self, name: str) -> Fields:
        """Return the fields of an object within this one; none if the field is absent."""
        values = self.values.get(name, {})
        if not is_object(values):
            raise self.error(name, "must be an object")
        return Fields(self._file, values)

    def over(self, others: Fields) -> Fields:
        """Return these fields and, where one is absent, those of ``others``."""
        return Fields(self._file, {**others.values, **self.values})

    def replaced(self, name: str, value: Any) -> Fields:
        """Return the same fields with another value of one."""
        return Fields(self._file, {**self.values, name: value})

    def token(self, name: str, vocab_size: int | None) -> int | None:
        """Return a token id, or a list of one; None if it is absent.

        Raises:
            ModelLoadError: it is not an id below ``vocab_size``.
        """
        ids = self.tokens(name, vocab_size)
        if len(ids) > 1:
            raise self.error(name, "must be one token id")
        return ids[0] if ids else None

    def tokens(self, name: str, vocab_size: int | None) -> tuple[int, ...]:
        """Return a token id or a list of ids as a tuple; empty if it is absent.

        Raises:
            ModelLoadError: one is not an id below ``vocab_size``.
        """
        value = self.values.get(name, [])
        ids = value if is_list(value) else [value]
        for token_id in ids:
            if not _is_int(token_id) or token_id < 0:
                raise self.error(name, "must be a token id")
            if vocab_size is not None and token_id >= vocab_size:
                raise self.error(name, f"must be below the vocabulary's size of {vocab_size}")
        return tuple(ids)

    def count(self, name: str, least: int = 0) -> int | None:
        """Return an integer of at least ``least``; None if it is absent.

        Raises:
            ModelLoadError: it is something else.
        """
        value = self.values.get(name)
        if value is not None and (not _is_int(value) or value < least):
            raise self.error(name, f"must be an integer of at least {least}")
        return value

    def number(self, name: str) -> float | None:
        """Return a finite number; None if it is absent.

        Raises:
            ModelLoadError: it is something else.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self.error(name, "must be a number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false; False if the field is absent.

        Raises:
            ModelLoadError: it is something else.
        """
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return a text; None if it is absent.

        Raises:
            ModelLoadError: it is something else.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "must be a text")
        return value

    def error(self, name: str, what: str) -> ModelLoadError:
        """Return the error for a field's value, with the file's path."""
        return ModelLoadError(f"{self._file}: {name} is {self.values.get(name)!r}; it {what}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
