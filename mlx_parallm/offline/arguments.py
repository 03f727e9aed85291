"""Arguments of ``LLM`` that may be one value or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from mlx_parallm.types.errors import InvalidRequestError

T = TypeVar("T")


def as_prompts(prompts: Any) -> list[Any]:
    """Return the prompts; one alone becomes a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def as_texts(texts: str | Sequence[str]) -> list[str]:
    """Return the texts; one alone becomes a list."""
    return [texts] if isinstance(texts, str) else list(texts)


def per_prompt(value: T | Sequence[T], num_prompts: int, name: str) -> list[T]:
    """Return a value for each prompt; raise InvalidRequestError if they are not as many."""
    if not _is_per_prompt(value):
        return [value] * num_prompts  # type: ignore[list-item]
    if len(value) != num_prompts:
        raise InvalidRequestError(
            f"{name} has {len(value)} entries for {num_prompts} prompts.", param=name
        )
    return list(value)


def _is_per_prompt(value: T | Sequence[T]) -> TypeGuard[Sequence[T]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_conversation(value: Sequence[Any]) -> bool:
    """True if it is a list of messages, not of conversations."""
    return bool(value) and isinstance(value[0], Mapping)
