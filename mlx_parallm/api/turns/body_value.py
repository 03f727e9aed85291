"""Values in a request body that its form leaves open: checked where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping, is_sequence


@dataclass(frozen=True, slots=True)
class BodyValue:
    """A JSON value and its place in the body, which refusals name.

    Attributes:
        value: as it came; None where there is none.
        where: its place, as ``tools[3].function``.
    """

    value: Any
    where: str

    def __getitem__(self, key: str) -> BodyValue:
        """Return a value of an object."""
        value = self.value.get(key) if is_mapping(self.value) else None
        return BodyValue(value, f"{self.where}.{key}")

    @property
    def type(self) -> Any:
        """The type of an object; it may be anything."""
        return self["type"].value

    def object(self) -> BodyValue:
        """Return the value, which must be an object."""
        if not isinstance(self.value, Mapping):
            raise self.refusal("must be an object")
        return self

    def entries(self, *, form: str = "{where}[{number}]", what: str = "") -> list[BodyValue]:
        """Return the entries of a list, each placed by ``form``; ``what`` is said of another value.

        Raises:
            InvalidRequestError: it is no list.
        """
        if not is_sequence(self.value):
            raise self.refusal(what or "must be a list")
        return [
            BodyValue(value, form.format(where=self.where, number=number))
            for number, value in enumerate(self.value)
        ]

    def text(self) -> str:
        """Return the value, which must be a text."""
        if not isinstance(self.value, str):
            raise self.refusal("must be a text")
        return self.value

    def filled_text(self) -> str:
        """Return the value, which must be a text that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            raise self.refusal("must be a text that is not empty")
        return self.value

    def optional_text(self) -> str | None:
        """Return the value, which must be a text or absent."""
        return None if self.value is None else self.text()

    def flag(self) -> bool:
        """Return the value, which must be true, false or absent, which is false."""
        if not isinstance(self.value, bool | None):
            raise self.refusal("must be true or false")
        return bool(self.value)

    def refusal(self, why: str, *, unsupported: bool = False) -> InvalidRequestError:
        """Return the error that names the place and says why; the caller raises it."""
        code = "unsupported_parameter" if unsupported else None
        return InvalidRequestError(f"{self.where} {why}.", param=self.where, code=code)
