"""Parsers that turn a setting's text or plain value into its field's value.

Flags and environment variables give text; YAML and TOML files give typed values. Every parser takes
both, and raises ValueError with a text such as "must be a whole number".
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from mlx_parallm.api.http.auth import ANY, named_host
from mlx_parallm.config import AUTO, MemoryBound, ModelTask, SpeculativeConfig
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.json_values import is_list, is_mapping, is_object, is_sequence

Parse = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class PerModel:
    """Values of a setting: ``shared`` for all models (None if not set), and ``own`` by model."""

    shared: Any = None
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def of(self, model: str | None) -> Any:
        """Return the value for a model; None if none was set."""
        return self.shared if model is None else self.own.get(model, self.shared)


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MAX_BYTES = 2**63
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})
# TASK_ALIASES: the names of vLLM and text-embeddings-inference.
TASK_ALIASES = {"embedding": "embed", "rerank": "score", "classification": "classify"}


def text(value: Any) -> str:
    """Return a non-empty text."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text")
    return value


def any_text(value: Any) -> str:
    """Return a text, which may be empty."""
    if not isinstance(value, str):
        raise ValueError("must be a text")  # noqa: TRY004 - one type for all wrong values
    return value


def folder(value: Any) -> Path:
    """Return the path of a folder, absolute; it need not be there yet."""
    return Path(text(value)).expanduser().absolute()


def boolean(value: Any) -> bool:
    """Return a bool; as text, true/false, 1/0, yes/no and on/off."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError("must be true or false")


def integer(minimum: int, maximum: int | None = None) -> Parse:
    """Return a parser of whole numbers within bounds."""
    rule = _rule("a whole number", minimum, maximum)

    def parse(value: Any) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError(rule) from None
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(rule)  # noqa: TRY004 - one type for all wrong values
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(rule)
        return number

    return parse


def engine_count(value: Any) -> int:
    """Return a number of engines; ``AUTO`` for "auto"."""
    if value == "auto":
        return AUTO
    try:
        return integer(1)(value)
    except ValueError:
        raise ValueError("must be a whole number of at least 1, or auto") from None


def image_count(value: Any) -> int:
    """Return a number of images: an integer, or vLLM's object with one for "image".

    Other media of the object may have 0 only: none of them is served.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if is_object(value):
        others = [count for name, count in value.items() if name != "image"]
        if "image" not in value or any(others):
            raise ValueError('must be a number of images, as an integer or as {"image": N}')
        value = value["image"]
        # vLLM also writes {"count": N, "width": …, "height": …}, to plan its memory.
        value = value.get("count") if is_object(value) else value
    return integer(0)(value)


def number(minimum: float, maximum: float | None = None, *, above: bool = False) -> Parse:
    """Return a parser of numbers within bounds; ``above`` excludes the lower bound."""
    rule = _rule("a number", minimum, maximum, above=above)

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(rule)  # noqa: TRY004 - one type for all wrong values
        try:
            result = float(value)
        except (ValueError, OverflowError):
            raise ValueError(rule) from None
        low = result > minimum if above else result >= minimum
        # The negated comparison refuses NaN too.
        if not (low and (result <= maximum if maximum is not None else result < float("inf"))):
            raise ValueError(rule)
        return result

    return parse


def size(value: Any) -> int:
    """Return a number of bytes; as text also 512M or 8GiB (units are powers of 1024)."""
    match = SIZE.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if match is None:
        raise ValueError("must be a number of bytes such as 8388608, 512M or 8GiB")
    amount = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= amount < MAX_BYTES:
        raise ValueError("must be at least one byte, and less than 8 EiB")
    return int(amount)


def size_or_none(value: Any) -> int:
    """Return a number of bytes as ``size`` does, or 0."""
    return 0 if str(value).strip() == "0" else size(value)


def memory_bound(value: Any) -> MemoryBound:
    """Return a size as ``size`` reads it, or a share of the memory: at most 1, or with a %."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 2.0
    if not isinstance(value, bool) and 0 < share <= 1 and text != "1":
        return MemoryBound(share=share)
    if text.endswith("%"):
        raise ValueError("must be a share above 0 and up to 100%, or a size such as 24GiB")
    return MemoryBound(size=size(value))


def per_model(parse: Parse, value: Any, models: Sequence[str | None]) -> PerModel:
    """Return the values for all models and, as MODEL=VALUE, for single ones.

    A file may have a table of models. Later values override earlier ones.

    Raises:
        ValueError: ``parse`` raises it.
        ConfigError: there is no such model.
    """
    owners = owner_names(models)
    # The value itself may be a table too.
    if is_mapping(value) and (parse is not table or value.keys() <= owners.keys()):
        for name in value:
            check_owner(name, owners)
        return PerModel(None, {owners[name]: parse(entry) for name, entry in value.items()})
    # Texts are not split at commas, because they may contain some.
    entries: list[Any] = value if is_list(value) else [value]
    if isinstance(value, str) and parse not in (text, table):
        entries = value.split(",")
    shared: Any = None
    own: dict[str, Any] = {}
    for entry in entries:
        name = _owner(entry, owners)
        if name is not None:
            own[owners[name]] = parse(entry[len(name) + 1 :])
            continue
        # A JSON object may have a "=" of its own.
        before = entry.partition("{")[0] if isinstance(entry, str) else ""
        if parse is not text and "=" in before:
            check_owner(before.rpartition("=")[0], owners)
        shared = parse(entry)
    return PerModel(shared, own)


def owner_names(models: Sequence[str | None]) -> dict[str, str]:
    """Return what MODEL may be in MODEL=VALUE, with the model that it stands for.

    It is a model's id or folder, or the last part of a folder's path if no other model has it, as
    in requests.
    """
    full = {model: model for model in models if model}
    folders = [(Path(model).expanduser(), model) for model in full]
    shorts = [(folder.resolve().name, model) for folder, model in folders if folder.is_dir()]
    counts = Counter(name for name, _ in shorts)
    return {name: model for name, model in shorts if counts[name] == 1} | full


def check_owner(name: Any, owners: Mapping[str, str]) -> None:
    """Raise ConfigError if no model has the name; see ``owner_names``."""
    if name not in owners:
        known = f"; MODEL may be {', '.join(owners)}" if owners else ""
        raise ConfigError(f"there is no model {name!r}{known}")


def _owner(entry: Any, owners: Mapping[str, str]) -> str | None:
    """Return the name before the "=" of an entry MODEL=VALUE; None if the entry is for all."""
    if not isinstance(entry, str):
        return None
    return max((name for name in owners if entry.startswith(f"{name}=")), key=len, default=None)


def choice(*options: str) -> Parse:
    """Return a parser of one of a few words."""

    def parse(value: Any) -> str:
        if value not in options:
            raise ValueError(f"must be one of {', '.join(options)}")
        return value

    return parse


def keys_in_file(value: Any) -> tuple[str, ...]:
    """Return the lines of a file that are not empty, without white space around them.

    Raises:
        ConfigError: the file cannot be read, or has no key.
    """
    path = Path(text(value)).expanduser()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{path} has no key")
    return keys


def listed(value: Any) -> tuple[str, ...]:
    """Return the texts of a list, a JSON list, or a text with commas."""
    items: Any = value
    if is_list(value) and len(value) == 1 and str(value[0]).lstrip().startswith("["):
        items = _json_list(str(value[0]))
    elif isinstance(value, str):
        items = _json_list(value) if value.lstrip().startswith("[") else value.split(",")
    if not is_sequence(items) or not all(isinstance(item, str) for item in items):
        raise ValueError("must be a text or a list of texts")
    texts = tuple(item.strip() for item in items)
    if not texts or not all(texts):
        raise ValueError("must not contain an empty text")
    return texts


def parsers(*names: str) -> Parse:
    """Return a parser of names, "auto" or "none", alone or as MODEL=NAME."""
    check_name = choice("auto", "none", *names)

    def parse(value: Any) -> tuple[str, ...]:
        entries = listed(value)
        for entry in entries:
            check_name(entry.rpartition("=")[2])
        return entries

    return parse


def tasks(value: Any) -> tuple[str, ...]:
    """Return tasks, alone or as MODEL=TASK, with vLLM's names translated."""
    entries: list[str] = []
    for entry in listed(value):
        owner, separator, name = entry.rpartition("=")
        name = TASK_ALIASES.get(name, name)
        choice("auto", *get_args(ModelTask))(name)
        entries.append(f"{owner}{separator}{name}")
    return tuple(entries)


def hosts(value: Any) -> tuple[str, ...]:
    """Return hosts' names and addresses without ports, normalised; ``*`` is any."""
    first = value[0] if is_list(value) and len(value) == 1 else value
    if isinstance(first, str) and first.startswith("[") and named_host(first) is not None:
        # ``listed`` would take an address in brackets for a JSON list.
        return (_host(first),)
    return tuple(_host(host) for host in listed(value))


def table(value: Any) -> dict[str, Any]:
    """Return the names and values of a JSON object, or of a file's table."""
    try:
        items = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON object") from None
    if not is_object(items):
        raise ValueError("must be a JSON object")
    return items


def speculative(value: Any) -> SpeculativeConfig:
    """Return the speculative settings in a JSON object, or in a file's table.

    Raises:
        ConfigError: a key is unknown or its value wrong; the message names it.
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


def _rule(kind: str, minimum: float, maximum: float | None, *, above: bool = False) -> str:
    if maximum is None:
        return f"must be {kind} {'above' if above else 'of at least'} {minimum:g}"
    return (
        f"must be {kind} {'above' if above else 'from'} {minimum:g} {'up ' * above}to {maximum:g}"
    )
