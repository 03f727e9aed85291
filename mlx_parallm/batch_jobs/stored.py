"""Records stored as JSON files, one per record, named by their ids."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from mlx_parallm.types.json_values import is_object

logger = logging.getLogger(__name__)

T = TypeVar("T")


def read_records(folder: Path, kind: type[T]) -> list[T]:
    """Return every record of a folder, logging and skipping unreadable ones."""
    records: list[T] = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(_record(json.loads(path.read_bytes()), kind))
        except (OSError, ValueError, TypeError) as problem:
            logger.warning("%s cannot be read and is ignored: %s", path, problem)
    return records


def _record(content: Any, kind: type[T]) -> T:
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if not is_object(content):
        raise TypeError("not an object")
    return kind(**{name: value for name, value in content.items() if name in names})
