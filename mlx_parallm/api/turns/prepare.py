"""From what is asked of a turn to a prompt, sampling parameters and parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.api.offload import maybe_in_thread
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.stream import TurnStream
from mlx_parallm.api.turns.tools import ToolMode
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.parsing.parts import TurnParser
from mlx_parallm.parsing.turn import turn_parser
from mlx_parallm.request import GenerateRequest, Grammar, SamplingParams, ThinkingBudget

# What begins the answer in OpenAI's Harmony (https://cookbook.openai.com/articles/openai-harmony).
HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """A turn that the engine can take.

    Attributes:
        turn: what was asked.
        model: who answers.
        rendered: the prompt as text.
        request: for the engine.
    """

    turn: TurnRequest
    model: ServedModel
    rendered: str
    request: GenerateRequest

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as tokens."""
        return self.request.prompt_ids

    def parsers(self) -> list[TurnParser]:
        """Fresh parsers, one per sample."""
        return [self._parser() for _ in range(self.request.params.n)]

    def stream(self) -> TurnStream:
        """What the engine's events are given to."""
        return TurnStream(
            self.parsers(),
            len(self.prompt_ids),
            max_calls=None if self.turn.parallel_tool_calls else 1,
        )

    def _parser(self) -> TurnParser:
        turn, reasoning = self.turn, _reasoning_format(self.turn, self.model)
        keeps_special = not self.request.params.skip_special_tokens
        hides = keeps_special and turn.params.skip_special_tokens
        return turn_parser(
            tool_format=_tool_format(turn, self.model),
            reasoning_format=reasoning,
            tools=[tool.for_template() for tool in turn.callable_tools],
            reasoning_is_open=reasoning is not None and reasoning.is_open_after(self.rendered),
            special_tokens=self.model.tokenizer.special_tokens if hides else (),
        )


async def prepare_turn(turn: TurnRequest, model: ServedModel) -> PreparedTurn:
    """Render and encode the conversation; decide how the answer is constrained and read.

    Raises:
        InvalidRequestError: a message is malformed, or the template refuses the conversation.
    """
    _check_tools(turn, model)
    rendered, prompt_ids = await render_turn(turn, model)
    request = GenerateRequest(
        request_id=turn.request_id,
        model=model.names[0],
        prompt_ids=prompt_ids,
        params=_params(turn, model, rendered),
        priority=turn.priority,
        client=turn.client,
        cache_salt=turn.cache_salt,
    )
    return PreparedTurn(turn=turn, model=model, rendered=rendered, request=request)


async def render_turn(turn: TurnRequest, model: ServedModel) -> tuple[str, tuple[int, ...]]:
    """The conversation as text and as tokens; off the event loop where it is long.

    Raises:
        InvalidRequestError: a message is malformed, or the template refuses the conversation.
    """
    messages = template_messages(turn.messages)
    tools = [tool.for_template() for tool in turn.callable_tools] or None

    def render() -> tuple[str, tuple[int, ...]]:
        text = model.tokenizer.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=turn.add_generation_prompt and not turn.continue_final_message,
            continue_final_message=turn.continue_final_message,
            template_kwargs={**model.chat_template_kwargs, **turn.template_kwargs},
        )
        return text, tuple(model.tokenizer.encode(text, add_special_tokens=False))

    return await maybe_in_thread(render, _length(messages, tools))


def _tool_format(turn: TurnRequest, model: ServedModel) -> ToolFormat | None:
    """How this turn's calls are written; None where there are none."""
    return model.tool_format if turn.callable_tools else None


def _reasoning_format(turn: TurnRequest, model: ServedModel) -> ReasoningFormat | None:
    return model.reasoning_format if turn.separate_reasoning else None


def _params(turn: TurnRequest, model: ServedModel, rendered: str) -> SamplingParams:
    """The engine's parameters; markers that are special tokens must be in the text."""
    formats = (_tool_format(turn, model), _reasoning_format(turn, model))
    special = model.tokenizer.special_tokens
    keeps = any(one is not None and one.keeps_special_tokens(special) for one in formats)
    skips = turn.params.skip_special_tokens and not keeps
    return replace(
        turn.params,
        skip_special_tokens=skips,
        grammar=_after_reasoning(turn.structure, model.reasoning_format, rendered),
        thinking_budget=_thinking_budget(turn, model, rendered),
    )


def _thinking_budget(turn: TurnRequest, model: ServedModel, rendered: str) -> ThinkingBudget | None:
    """What limits the reasoning; a model that marks none needs no limit."""
    form = model.reasoning_format
    if turn.thinking_budget is None or form is None:
        return None
    end_id = model.tokenizer.token_id(form.end)
    if end_id is None or form.is_harmony:
        raise _unsupported(
            "This model ends its reasoning with more than one token.", "thinking_token_budget"
        )
    return ThinkingBudget(
        tokens=turn.thinking_budget,
        end_id=end_id,
        start_id=model.tokenizer.token_id(form.start),
        is_open=form.is_open_after(rendered),
    )


def _after_reasoning(
    grammar: Grammar | None, form: ReasoningFormat | None, rendered: str
) -> Grammar | None:
    """The grammar of what follows the reasoning, which is free."""
    if grammar is None or form is None:
        return grammar
    if form.is_harmony:
        return replace(grammar, begins_after=HARMONY_FINAL)
    if form.is_open_after(rendered):
        return replace(grammar, begins_after=form.end)
    if rendered.rstrip().endswith(form.end):
        return grammar
    return replace(grammar, begins_after=form.end, free_start=form.start)


def _check_tools(turn: TurnRequest, model: ServedModel) -> None:
    """Refuse tools that the model would not be told of, or whose calls nobody could read."""
    if not turn.callable_tools:
        return
    if turn.tool_choice.mode is ToolMode.REQUIRED:
        raise _unsupported("A tool_choice that forces a call is not supported.", "tool_choice")
    if not model.allows_auto_tools:
        raise _unsupported("This server lets no model choose tools by itself.", "tool_choice")
    if not model.tokenizer.takes_tools:
        raise _unsupported("This model's chat template takes no tools.", "tools")
    if model.tool_format is None and model.parses_tools:
        raise _unsupported(
            "How this model writes tool calls is not known; --tool-call-parser says it.", "tools"
        )


def _unsupported(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="unsupported_parameter")


def _length(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> int:
    """About how many characters there are to tokenise."""
    texts = sum(len(message.get("content") or "") for message in messages)
    return texts + 512 * len(tools or ()) + sum(512 for m in messages if "tool_calls" in m)
