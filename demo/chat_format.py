"""Conversations as text: the chat template, and the model's target after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from demo.example import Example
from mlx_parallm.types.errors import ConfigError

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
MARKER_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)


def template_text() -> str:
    """Return the Jinja source of the chat template."""
    return (Path(__file__).resolve().parent / "chat_template.jinja").read_text()


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ConfigError(f"The tokenizer has no token {token}.")
    return number


class ChatFormat:
    """Renders prompts with the chat template, as tokenizers of transformers do."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = self._to_json
        self._template = environment.from_string(template_text())

    @staticmethod
    def _to_json(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def prompt(self, example: Example, *, thinking: bool) -> str:
        """Return the prompt up to where the assistant begins to write."""
        return self._template.render(
            messages=example.messages,
            tools=list(example.tools) or None,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )

    @staticmethod
    def target(example: Example, *, thinking: bool) -> str:
        """Return the model's target after the prompt, including the end of the turn."""
        steps = f"<think>\n{example.steps}\n</think>\n\n" if thinking and example.steps else ""
        return steps + example.content + IM_END
