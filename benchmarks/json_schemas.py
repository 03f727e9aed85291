"""Varied JSON schemas whose answers are bounded: as people write them, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

MAX_DEPTH = 3
WORDS = tuple(
    "id name title kind status price count active tags owner city street code email created "  # noqa: SIM905
    "score color size note level items parent start end ratio unit".split()
)
PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^[a-z]{1,8}$", "^#[0-9a-f]{6}$", "^(on|off)$", r"^\d{3}-\d{4}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def make_schemas(count: int, seed: int = 0) -> list[Schema]:
    """Return ``count`` schemas; a larger count only appends further ones."""
    return [_Writer(random.Random(f"{seed}:{number}")).schema() for number in range(count)]


class _Writer:
    """Writes one schema."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._definitions: dict[str, Schema] = {}

    def schema(self) -> Schema:
        root = self._object(0) if self._draw.random() < 0.9 else self._array(0)
        if self._definitions:
            root["$defs"] = self._definitions
        return root

    def _value(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            self._text,
            self._text,
            self._pattern,
            self._format,
            self._integer,
            self._number,
            self._enum,
            self._constant,
            lambda: {"type": self._draw.choice(["boolean", "null"])},
            lambda: {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        ]
        if depth >= MAX_DEPTH:
            return self._draw.choice(leaves)()
        nested: list[Callable[[], Schema]] = [
            lambda: self._object(depth + 1),
            lambda: self._array(depth + 1),
            lambda: self._any_of(depth + 1),
            lambda: self._reference(depth + 1),
        ]
        return self._draw.choice(leaves + nested)()

    def _object(self, depth: int) -> Schema:
        names = self._draw.sample(WORDS, self._draw.randint(1, 5))
        needed = [name for name in names if self._draw.random() < 0.7]
        schema: Schema = {
            "type": "object",
            "properties": {name: self._value(depth) for name in names},
            "required": needed,
            "additionalProperties": False,
        }
        if self._draw.random() < 0.3:
            schema["title"] = self._draw.choice(WORDS).title()
        if self._draw.random() < 0.3:
            schema["description"] = " ".join(self._draw.choices(WORDS, k=5))
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._draw.randint(0, 2)
        return {
            "type": "array",
            "items": self._value(depth),
            "minItems": least,
            "maxItems": least + self._draw.randint(0, 3),
        }

    def _any_of(self, depth: int) -> Schema:
        key = self._draw.choice(["anyOf", "anyOf", "oneOf"])
        kinds: list[Schema] = [
            {"type": "integer", "minimum": 0, "maximum": 999},
            {"type": "boolean"},
            {"type": "null"},
            self._text(),
            self._object(depth),
        ]
        return {key: self._draw.sample(kinds, self._draw.randint(2, 3))}

    def _reference(self, depth: int) -> Schema:
        name = f"{self._draw.choice(WORDS)}{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._object(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _text(self) -> Schema:
        least = self._draw.choice([0, 0, 1, 3])
        return {
            "type": "string",
            "minLength": least,
            "maxLength": least + self._draw.randint(4, 24),
        }

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._draw.choice(PATTERNS)}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._draw.choice(FORMATS)}

    def _integer(self) -> Schema:
        least = self._draw.choice([0, 1, -50])
        return {
            "type": "integer",
            "minimum": least,
            "maximum": least + 10 ** self._draw.randint(1, 6),
        }

    def _number(self) -> Schema:
        if self._draw.random() < 0.5:
            return {"type": "number", "minimum": 0, "maximum": 1}
        return {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 100}

    def _enum(self) -> Schema:
        values: list[Any] = [*self._draw.sample(WORDS, 4), 1, 2.5, None, True]
        return {"enum": self._draw.sample(values, self._draw.randint(1, 5))}

    def _constant(self) -> Schema:
        return {"const": self._draw.choice([*WORDS, 0, 7, False])}
