"""The conversion of any library's error over a model's files into a line with model and field."""

from __future__ import annotations

import contextlib
import json
import linecache
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mlx_parallm.types.errors import ModelLoadError, ParallmError

logger = logging.getLogger(__name__)

#: ``FILES``: the files whose fields may be at fault.
FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
#: ``OBJECTS``: the files that are JSON objects.
OBJECTS = (*FILES, "tokenizer.json")
#: ``MAX_FIELDS``: most fields in a message; the next constant limits its characters on the cause.
MAX_FIELDS = 3
MAX_CHARS = 240
#: ``TELLING``: errors whose text alone explains the fault; for others the class is added.
TELLING = (OSError, ValueError, RuntimeError)
WORD = re.compile(r"\w+")


@contextlib.contextmanager
def load_failures(folder: Path, what: str = "could not be loaded") -> Iterator[None]:
    """Raise ModelLoadError, which names the folder, for an error that is not the project's own.

    A model's files may have any fault, and mlx_lm, transformers, tokenizers and MLX raise any class
    for it; a module of mlx_lm ends the process if a package is missing. The traceback is logged at
    debug level.
    """
    try:
        yield
    except ParallmError:
        raise
    except (Exception, SystemExit) as cause:
        logger.debug("%s %s", folder, what, exc_info=cause)
        where = _suspects(cause, folder)
        raise ModelLoadError(f"{folder} {what}{where}: {reason(cause)}") from cause


def reason(cause: BaseException) -> str:
    """Return an error's text on one line, with its class if the text alone explains little."""
    text = " ".join(str(cause).split())
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]}…"
    kind = type(cause).__name__
    if not text:
        return kind
    is_telling = isinstance(cause, TELLING) or kind.startswith("StrictDataclass")
    return text if is_telling else f"{kind}: {text}"


def _suspects(cause: BaseException, folder: Path) -> str:
    """Return the files or fields that may be at fault, in parentheses; "" if none is known.

    A field is suspected if the code that raised the error, or its callers, name it and its value is
    unusual. An error that names a field itself needs no guess.
    """
    if broken := [file for file in OBJECTS if _is_broken(folder / file)]:
        return f" ({', '.join(broken)}: not a JSON object)"
    fields = _fields(folder)
    words = set(WORD.findall(str(cause)))
    if words & {name for name, field in fields.items() if field.is_unusual}:
        return ""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        used = dict.fromkeys(WORD.findall(_statement(frame)))
        suspects = [name for name in used if name in fields and fields[name].is_unusual]
        if suspects:
            file = fields[suspects[0]].file
            return f" ({file}: {', '.join(suspects[:MAX_FIELDS])})"
    return ""


def _is_broken(file: Path) -> bool:
    """Return True if a file is there that should hold a JSON object and does not."""
    try:
        return not isinstance(json.loads(file.read_bytes()), dict)
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True


def _statement(frame: traceback.FrameSummary) -> str:
    """Return the lines of the statement that a frame was in."""
    first = frame.lineno or 0
    last = frame.end_lineno or first
    return "".join(linecache.getline(frame.filename, number) for number in range(first, last + 1))


class _Field(NamedTuple):
    """A field of a model's files.

    Attributes:
        file: the name of the file that has it.
        is_unusual: True unless its value is one that most fields may have: a bool, a whole number
            of at least 1, or a fraction between 0 and 1.
    """

    file: str
    is_unusual: bool


def _fields(folder: Path) -> dict[str, _Field]:
    fields: dict[str, _Field] = {}
    for file in reversed(FILES):
        try:
            content = json.loads((folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            fields |= {name: _Field(file, _is_unusual(value)) for name, value in content.items()}
    return fields


def _is_unusual(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if not isinstance(value, int | float):
        return True
    return value <= 0 or (value > 1 and not float(value).is_integer())
