"""Turns the text or plain value of a setting into the value its configuration field takes.

A value comes as text from flags and environment variables, and typed from YAML and TOML files.
Every parser takes both and raises ValueError with what it wants, e.g. "must be a whole number".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from mlx_parallm.api.hosts import ANY, named_host
from mlx_parallm.config import ModelTask, SpeculativeConfig

Parse = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class PerModel:
    """Values of a setting: one for all models, None if there is none, and those of single ones."""

    shared: Any = None
    own: Mapping[str, Any] = field(default_factory=dict)

    def of(self, model: str | None) -> Any:
        """Return the value for a model; None if none was given."""
        return self.shared if model is None else self.own.get(model, self.shared)


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MAX_BYTES = 2**63
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})
# What vLLM and text-embeddings-inference call the same.
TASK_ALIASES = {"embedding": "embed", "rerank": "score", "classification": "classify"}


def text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text")
    return value


def any_text(value: Any) -> str:
    """A text, perhaps empty."""
    if not isinstance(value, str):
        raise ValueError("must be a text")  # noqa: TRY004 - one type for all wrong values
    return value


def boolean(value: Any) -> bool:
    """True or false; 1/0, yes/no and on/off as text."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError("must be true or false")


def integer(minimum: int, maximum: int | None = None) -> Parse:
    """A whole number within bounds."""
    wanted = _wanted("a whole number", minimum, maximum)

    def parse(value: Any) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError(wanted) from None
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(wanted)  # noqa: TRY004 - one type for all wrong values
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(wanted)
        return number

    return parse


def number(minimum: float, maximum: float | None = None, *, above: bool = False) -> Parse:
    """A number within bounds; with ``above`` the lower bound itself is refused."""
    wanted = _wanted("a number", minimum, maximum, above=above)

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(wanted)  # noqa: TRY004 - one type for all wrong values
        try:
            result = float(value)
        except (ValueError, OverflowError):
            raise ValueError(wanted) from None
        low = result > minimum if above else result >= minimum
        # Written so that NaN fails too.
        if not (low and (result <= maximum if maximum is not None else result < float("inf"))):
            raise ValueError(wanted)
        return result

    return parse


def size(value: Any) -> int:
    """Bytes: a number, or text such as 512M, 8GiB (units are powers of 1024)."""
    match = SIZE.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if match is None:
        raise ValueError("must be a number of bytes such as 8388608, 512M or 8GiB")
    amount = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= amount < MAX_BYTES:
        raise ValueError("must be at least one byte, and less than 8 EiB")
    return int(amount)


def size_or_none(value: Any) -> int:
    """``size``, or 0."""
    return 0 if str(value).strip() == "0" else size(value)


def per_model(parse: Parse, value: Any, models: Sequence[str | None]) -> PerModel:
    """Return what is given for all of these models, and for single ones as MODEL=VALUE.

    A file may have a table of models. Of two values for the same, the later counts.

    Raises:
        ValueError: ``parse`` raises it, or there is no such model.
    """
    if isinstance(value, Mapping):
        for name in value:
            _check_model(name, models)
        return PerModel(None, {name: parse(one) for name, one in value.items()})
    # A text may have commas of its own.
    splits = isinstance(value, str) and parse is not text
    entries = value.split(",") if splits else value if isinstance(value, list) else [value]
    shared, own = None, {}
    for entry in entries:
        owner = _owner(entry, models)
        if owner is not None:
            own[owner] = parse(entry[len(owner) + 1 :])
            continue
        if parse is not text and isinstance(entry, str) and "=" in entry:
            _check_model(entry.rpartition("=")[0], models)
        shared = parse(entry)
    return PerModel(shared, own)


def _owner(entry: Any, models: Sequence[str | None]) -> str | None:
    """Return the model that an entry MODEL=VALUE is for; None if it is for all."""
    if not isinstance(entry, str):
        return None
    named = [one for one in models if one and entry.startswith(f"{one}=")]
    return max(named, key=len, default=None)


def _check_model(name: str, models: Sequence[str | None]) -> None:
    if name not in models:
        raise ValueError(f"there is no model {name!r}")


def choice(*options: str) -> Parse:
    """One of a few words."""

    def parse(value: Any) -> str:
        if value not in options:
            raise ValueError(f"must be one of {', '.join(options)}")
        return value

    return parse


def listed(value: Any) -> tuple[str, ...]:
    """Texts: a list, a JSON list, or several separated by commas."""
    items: Any = value
    if isinstance(value, list) and len(value) == 1 and str(value[0]).lstrip().startswith("["):
        items = _json_list(str(value[0]))
    elif isinstance(value, str):
        items = _json_list(value) if value.lstrip().startswith("[") else value.split(",")
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError("must be a text or a list of texts")
    found = tuple(item.strip() for item in items)
    if not found or not all(found):
        raise ValueError("must not contain an empty text")
    return found


def parsers(*names: str) -> Parse:
    """One of these names, "auto" or "none" for every model, or MODEL=NAME for one of several."""
    known = choice("auto", "none", *names)

    def parse(value: Any) -> tuple[str, ...]:
        found = listed(value)
        for one in found:
            known(one.rpartition("=")[2])
        return found

    return parse


def tasks(value: Any) -> tuple[str, ...]:
    """What every model is served for, or MODEL=TASK for one of several; by vLLM's names too."""
    found = []
    for one in listed(value):
        owner, separator, name = one.rpartition("=")
        name = TASK_ALIASES.get(name, name)
        choice("auto", *get_args(ModelTask))(name)
        found.append(f"{owner}{separator}{name}")
    return tuple(found)


def hosts(value: Any) -> tuple[str, ...]:
    """Names and addresses without ports, as they are compared; ``*`` is any."""
    first = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(first, str) and first.startswith("[") and named_host(first) is not None:
        # An address in brackets, which ``listed`` would take for a JSON list.
        return (_host(first),)
    return tuple(_host(host) for host in listed(value))


def table(value: Any) -> dict[str, Any]:
    """Names with values: a JSON object, or a table of a file."""
    try:
        items = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON object") from None
    if not isinstance(items, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004 - one type for all wrong values
    return items


def speculative(value: Any) -> SpeculativeConfig:
    """Speculative decoding: a JSON object, or a table of a file.

    Raises:
        ConfigError: a key of it is unknown or its value wrong; the message says which.
    """
    return SpeculativeConfig.from_mapping(table(value))


def _host(value: str) -> str:
    if value == ANY:
        return value
    host = named_host(value)
    if host is None or ANY in host or not host.isascii():
        raise ValueError("must be names or addresses of hosts, such as llm.example")
    return host


def _json_list(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise ValueError("is not a JSON list") from None


def _wanted(kind: str, minimum: float, maximum: float | None, *, above: bool = False) -> str:
    if maximum is None:
        return f"must be {kind} {'above' if above else 'of at least'} {minimum:g}"
    return (
        f"must be {kind} {'above' if above else 'from'} {minimum:g} {'up ' * above}to {maximum:g}"
    )
