"""Stored files of examples, one as JSON in each line, which a refusal names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mlx_parallm.api.http.errors import message_of, path_of
from mlx_parallm.api.mezo.rows import MAX_ROWS
from mlx_parallm.batch_jobs.service import BatchService
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError

T = TypeVar("T")
PURPOSE = "fine-tune"
# MAX_WHY_CHARS: of what is wrong with a line.
MAX_WHY_CHARS = 200
# MAX_LINE_BYTES: longer lines are refused unread.
MAX_LINE_BYTES = 16 << 20


async def stored_path(
    batches: BatchService, file_id: str, owner: str, param: str, max_bytes: int
) -> Path:
    """Return where a caller's file of examples is.

    Args:
        batches: keeps the files.
        file_id: which file.
        owner: the caller.
        param: the field of the body that names it, for errors.
        max_bytes: most bytes of the data of a session.

    Raises:
        NotFoundError: the caller has no such file.
        InvalidRequestError: it has another purpose, or is too large.
    """
    files = await batches.files()
    try:
        record = await files.get(file_id, owner)
    except NotFoundError as problem:
        raise NotFoundError(str(problem), param=param) from None
    if record.purpose != PURPOSE:
        raise InvalidRequestError(
            f"{file_id} is of purpose {record.purpose!r}, not {PURPOSE!r}.", param=param
        )
    if record.num_bytes > max_bytes:
        raise InvalidRequestError(
            f"{file_id} has {record.num_bytes} bytes, and the data of a session may have "
            f"{max_bytes} (see --max-data-bytes).",
            param=param,
        )
    return files.path(record)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, and of one that is too long its beginning."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            yield line


def parsed_lines(
    lines: Iterable[bytes], read: Callable[[Any, int], T], *, param: str, what: str
) -> list[T]:
    """Return what the lines of a file are read as; empty ones are left out.

    Args:
        lines: JSON lines.
        read: reads the JSON value of a line and its number, from 1; raises ValidationError or
            InvalidRequestError.
        param: the field of the body that names the file, for errors.
        what: the examples, as errors call them.

    Raises:
        InvalidRequestError: a line cannot be used; the message has its number, from 1.
    """
    items: list[T] = []
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise _bad_line(number, f"it has more than {MAX_LINE_BYTES} bytes", param)
        if not line.strip():
            continue
        try:
            items.append(read(json.loads(line), number))
        except ValidationError as problem:
            first = problem.errors(include_url=False)[0]
            field, what = path_of(first["loc"]), message_of(first)
            why = f"{field}: {what}" if field else what
            raise _bad_line(number, why, param) from None
        except InvalidRequestError as problem:
            raise _bad_line(number, str(problem), param) from None
        except (ValueError, RecursionError):
            raise _bad_line(number, "it is not JSON", param) from None
        if len(items) > MAX_ROWS:
            raise _bad_line(number, f"there are more than {MAX_ROWS} {what}", param)
    if not items:
        raise InvalidRequestError(f"The file has no {what}.", param=param)
    return items


def _bad_line(number: int, why: str, param: str) -> InvalidRequestError:
    why = why[:MAX_WHY_CHARS].rstrip(".")
    return InvalidRequestError(f"Line {number} of the file: {why}.", param=param)
