"""How a model writes tool calls and reasoning, from its settings and its tokenizer."""

from __future__ import annotations

from mlx_parallm.config import ModelConfig
from mlx_parallm.parsing import registry
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer


def tool_format_of(config: ModelConfig, tokenizer: ParallmTokenizer) -> ToolFormat | None:
    """Return the format of tool calls; None where there is none, or none is known.

    Raises:
        ConfigError: the setting names an unknown one.
    """
    name = config.tool_call_parser
    if name == "auto":
        return registry.detect_tool_format(tokenizer.chat_template, tokenizer.vocabulary())
    return None if name == "none" else registry.tool_format(name)


def reasoning_format_of(config: ModelConfig, tokenizer: ParallmTokenizer) -> ReasoningFormat | None:
    """Return the format of reasoning; None where there is none, or none is known.

    Raises:
        ConfigError: the setting names an unknown one.
    """
    name = config.reasoning_parser
    if name == "auto":
        return registry.detect_reasoning_format(tokenizer.chat_template, tokenizer.vocabulary())
    return None if name == "none" else registry.reasoning_format(name)
