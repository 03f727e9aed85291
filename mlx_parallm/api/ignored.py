"""Tells clients which fields of their requests were not read."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from starlette.responses import Response

logger = logging.getLogger(__name__)

HEADER = "x-ignored-fields"
MAX_NAMES = 20
MAX_NAME_CHARS = 64


def tell_ignored(response: Response, names: Iterable[str]) -> None:
    """Name the fields in a header and in the log; names that no header can hold are left out."""
    told = [name for name in sorted(names) if _is_plain(name)][:MAX_NAMES]
    if told:
        response.headers[HEADER] = ", ".join(told)
        logger.warning("ignored unknown request fields: %s", ", ".join(told))


def _is_plain(name: str) -> bool:
    plain = name.replace(".", "").replace("_", "").replace("-", "")
    return len(name) <= MAX_NAME_CHARS and plain.isascii() and plain.isalnum()
