"""Dataclasses as JSON: written field by field, and read with each value checked by its type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from mlx_parallm.types.json_values import is_list, is_object

T = TypeVar("T")
Reader = Callable[[Any], Any]
# SCALARS: the types of JSON values that a field of a type may have. True is no int, although Python
# says so, and JSON's numbers without a fraction are floats too.
SCALARS: dict[Any, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    NoneType: frozenset({NoneType}),
    int: frozenset({int}),
    float: frozenset({int, float}),
}


class Record(Protocol):
    """A dataclass of JSON values that a table holds."""

    @property
    def id(self) -> str:
        """The primary key."""
        ...


def dumped(content: Any) -> str:
    """Return JSON values, among which dataclasses may be, as JSON."""
    return json.dumps(content, default=as_fields)


def as_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; those that are dataclasses stay so."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def as_record(content: Any, kind: type[T], *, ignores_others: bool = False) -> T:
    """Return a dataclass made from what ``dumped`` wrote, read by ``json.loads``.

    Args:
        content: an object; fields that it lacks have their defaults.
        kind: the dataclass. Tuples and lists of its fields have entries of one type.
        ignores_others: True to ignore fields that the dataclass does not have.

    Raises:
        TypeError, ValueError: a field is missing or unknown, or its value is none of its type.
    """
    if ignores_others and is_object(content):
        names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
        content = {name: value for name, value in content.items() if name in names}
    return _reader_of(kind)(content)


@cache
def _reader_of(hint: Any) -> Reader:
    """Return a function that checks a JSON value and returns it as a value of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return _unchanged
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    if origin in (Union, UnionType):
        return _union_reader([_reader_of(arg) for arg in args])
    if origin is Literal:
        return _member_reader(frozenset(args))
    if origin in (list, tuple):
        return _list_reader(origin, args[0])
    if origin in (dict, Mapping):
        return _object_reader(_reader_of(args[1]))
    if hint in SCALARS:
        return _scalar_reader(hint)
    return hint  # an enumeration, which is called with the value of a member


def _unchanged(value: Any) -> Any:
    return value


def _dataclass_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {field.name: _reader_of(hints[field.name]) for field in fields(kind)}
    required = {field.name for field in fields(kind) if _has_no_default(field)}

    def read(content: Any) -> Any:
        if not is_object(content):
            raise TypeError("it is no object")
        if not required <= content.keys():
            raise TypeError(f"it has no {min(required - content.keys())}")
        if not content.keys() <= readers.keys():
            raise TypeError(f"it has an unknown field {min(content.keys() - readers.keys())}")
        name, values = "", {}
        try:
            for name, reader in readers.items():
                if name in content:
                    values[name] = reader(content[name])
        except (TypeError, ValueError) as problem:
            raise TypeError(f"{name}: {problem}") from None
        return kind(**values)

    return read


def _has_no_default(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _union_reader(readers: list[Reader]) -> Reader:
    def read(value: Any) -> Any:
        problems: list[Exception] = []
        for reader in readers:
            try:
                return reader(value)
            except (TypeError, ValueError) as problem:
                problems.append(problem)
        raise problems[0]

    return read


def _member_reader(members: frozenset[Any]) -> Reader:
    def read(value: Any) -> Any:
        if value not in members:
            raise ValueError(f"it is none of {sorted(members)}")
        return value

    return read


def _list_reader(kind: Callable[[Any], Any], hint: Any) -> Reader:
    reader = _reader_of(hint)

    def read(value: Any) -> Any:
        if not is_list(value):
            raise TypeError("it is no list")
        # Lists of tokens are long.
        if hint in SCALARS and set(map(type, value)) <= SCALARS[hint]:
            return kind(value)
        return kind(map(reader, value))

    return read


def _object_reader(reader: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not is_object(value):
            raise TypeError("it is no object")
        return {name: reader(item) for name, item in value.items()}

    return read


def _scalar_reader(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) not in SCALARS[kind]:
            raise TypeError(f"{type(value).__name__} is no {kind.__name__}")
        return value

    return read
