"""The texts of a body's ``inputs``."""

from __future__ import annotations

from typing import Any

from mlx_parallm.errors import InvalidRequestError

MAX_TEXTS = 8192


def texts_of(inputs: Any) -> list[str]:
    """A text or several.

    Raises:
        InvalidRequestError: ``inputs`` is something else.
    """
    given = [inputs] if isinstance(inputs, str) else inputs
    is_list = isinstance(given, list) and 0 < len(given) <= MAX_TEXTS
    if is_list and all(isinstance(one, str) for one in given):
        return given
    raise InvalidRequestError(
        f"inputs must be a text or a list of 1 to {MAX_TEXTS} texts.", param="inputs"
    )


def cut_to(truncate: bool | None) -> int | None:
    """The same as ``truncate_prompt_tokens`` says it."""
    return -1 if truncate else None
