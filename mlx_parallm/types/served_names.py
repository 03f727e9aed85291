"""Names that requests use for models and adapters."""

from __future__ import annotations

from mlx_parallm.types.errors import InvalidRequestError

MAX_NAME = 256
# DOTS: parts of a path that clients and proxies resolve: /v1/adapters/.. would be another route.
DOTS = frozenset({".", ".."})


def check_name(name: str, *, param: str = "name") -> None:
    """Refuse a name that could not be written in a path, a line of a log, or a list.

    Raises:
        InvalidRequestError: it is empty or too long, has characters that cannot be printed, or a
            part that is "." or "..".
    """
    if not name or len(name) > MAX_NAME:
        raise InvalidRequestError(f"A name must have 1 to {MAX_NAME} characters.", param=param)
    if not name.isprintable():
        raise InvalidRequestError("A name must have printable characters only.", param=param)
    if DOTS & set(name.split("/")):
        raise InvalidRequestError('No part of a name can be "." or "..".', param=param)
