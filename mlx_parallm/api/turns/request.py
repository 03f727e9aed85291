"""Requests for one turn, in the form that all protocols share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_parallm.api.turns.tools import Tool, ToolChoice, ToolMode, callable_tools
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.images.processor import AS_CONFIGURED, PixelRange
from mlx_parallm.types.request import SamplingParams

# The variables by which chat templates turn reasoning on and off.
THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A conversation to be continued by the assistant.

    Attributes:
        request_id: unique among the requests in flight.
        messages: in the shape of chat templates: ``role`` (system, user, assistant, tool), a text
            as ``content``, or parts where there are images, ``tool_calls`` with a text or an
            object as ``arguments``, ``tool_call_id``, ``reasoning_content``. Checked by
            ``prepare_turn``.
        tools: what may be called; checked by ``check_tools``.
        tool_choice: what must be called; checked by ``check_choice``.
        parallel_tool_calls: false: at most one call; further ones are left out.
        structure: what the content must match, where the model calls no tool.
        structure_field: the body's field that it came from, for errors.
        template_kwargs: further variables of the template, such as ``enable_thinking``; they win
            over the model's default ones.
        pixel_range: how images are resized.
        separate_reasoning: false: reasoning is content, with its markers.
        thinking_budget: most tokens of reasoning; None for no limit.
        add_generation_prompt: open the assistant's turn.
        continue_final_message: go on with the last message instead.
        params: how tokens are chosen, without a grammar.
        truncate: most tokens of the prompt, a longer one is cut; -1: what the context leaves; None:
            it is refused.
        truncation_side: the end of the prompt at which it is cut.
        priority: lower runs first.
        parses_calls: whether the caller reads calls from the tokens by itself. Then the prompt
            has the tools though the choice is none, as with vLLM.
        client: whose request it is.
        cache_salt: requests of different salts never share cached blocks.
    """

    request_id: str
    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    structure: GrammarSpec | None = None
    structure_field: str = "response_format"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pixel_range: PixelRange = AS_CONFIGURED
    separate_reasoning: bool = True
    thinking_budget: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    parses_calls: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    truncate: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    priority: int = 0
    client: str = ""
    cache_salt: str | None = None

    @property
    def asks_for_thinking(self) -> bool:
        """True if the caller, not only the model, wants reasoning."""
        effort = self.template_kwargs.get("reasoning_effort")
        switches = (self.template_kwargs.get(name) for name in THINKING_SWITCHES)
        return any(switch is True for switch in switches) or effort not in (None, "none")

    @property
    def begun(self) -> str:
        """The text of the answer that is there already."""
        if not self.continue_final_message or not self.messages:
            return ""
        content = self.messages[-1].get("content")
        return content if isinstance(content, str) else ""

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt has.

        A grammar keeps it from calling those that it may not: then it sees all, so that the prompt
        is the same whatever the choice.
        """
        shows_none = self.parses_calls and self.tool_choice.mode is ToolMode.NONE
        if shows_none or self.tool_choice.mode is ToolMode.REQUIRED:
            return self.tools
        return self.callable_tools

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called in this turn."""
        return callable_tools(self.tools, self.tool_choice)
