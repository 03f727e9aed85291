"""All formats by name, and which one a model writes."""

from __future__ import annotations

from collections.abc import Container

from mlx_parallm.errors import ConfigError
from mlx_parallm.parsing.families.hermes import HERMES
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.parsing.reasoning import THINK

_TOOL_FORMATS = (HERMES,)
_REASONING_FORMATS = (THINK,)
_TOOL_ALIASES: dict[str, str] = {}
_REASONING_ALIASES = {"qwen3": "deepseek_r1"}


def tool_format_names() -> tuple[str, ...]:
    """The names that ``tool_format`` knows."""
    return tuple(sorted([*(known.name for known in _TOOL_FORMATS), *_TOOL_ALIASES]))


def reasoning_format_names() -> tuple[str, ...]:
    """The names that ``reasoning_format`` knows."""
    return tuple(sorted([*(known.name for known in _REASONING_FORMATS), *_REASONING_ALIASES]))


def tool_format(name: str) -> ToolFormat:
    """The tool-call format of that name.

    Raises:
        ConfigError: there is none.
    """
    wanted = _TOOL_ALIASES.get(name, name)
    for known in _TOOL_FORMATS:
        if known.name == wanted:
            return known
    names = ", ".join(tool_format_names())
    raise ConfigError(f"There is no tool-call parser {name!r}; known are {names}.")


def reasoning_format(name: str) -> ReasoningFormat:
    """The reasoning format of that name.

    Raises:
        ConfigError: there is none.
    """
    wanted = _REASONING_ALIASES.get(name, name)
    for known in _REASONING_FORMATS:
        if known.name == wanted:
            return known
    names = ", ".join(reasoning_format_names())
    raise ConfigError(f"There is no reasoning parser {name!r}; known are {names}.")


def detect_tool_format(chat_template: str | None, tokens: Container[str]) -> ToolFormat | None:
    """The format of a model's tool calls, from its chat template and its vocabulary."""
    found = (known for known in _TOOL_FORMATS if known.detect(chat_template or "", tokens))
    return next(found, None)


def detect_reasoning_format(
    chat_template: str | None, tokens: Container[str]
) -> ReasoningFormat | None:
    """The format of a model's reasoning, from its chat template and its vocabulary."""
    found = (known for known in _REASONING_FORMATS if known.detect(chat_template or "", tokens))
    return next(found, None)
