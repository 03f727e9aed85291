"""From what is asked of a turn to a prompt, sampling parameters and parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

from mlx_parallm.api.http.offload import LONG_TEXT_CHARS, in_thread, maybe_in_thread
from mlx_parallm.api.turns.constraints import Constraint, constrain, unsupported
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.api.turns.images import Images, image_sources
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.samples import LazySequence
from mlx_parallm.api.turns.sources import SourceForm, read_source, source_params
from mlx_parallm.api.turns.stream import TurnStream
from mlx_parallm.api.turns.tools import ToolMode
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar.spec import is_longer
from mlx_parallm.images.latest_turn import SpecialTokens
from mlx_parallm.images.prompt import (
    Hide,
    ImagePrompt,
    Messages,
    as_it_is,
    image_prompt,
    text_prompt,
)
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.parsing.parts import TurnParser
from mlx_parallm.parsing.structured import ContentParser, ParserByStart, ParsersInTurn
from mlx_parallm.parsing.turn import turn_parser
from mlx_parallm.tokenizer.cut import cut_ids
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import num_image_tokens, num_source_tokens
from mlx_parallm.types.request import GenerateRequest, SamplingParams, ThinkingBudget
from mlx_parallm.types.token_limit import TokenLimit

# MESSAGE_CHARS: to render a message takes as long as to tokenise so many characters.
MESSAGE_CHARS = 16
TRUNCATE = "truncate_prompt_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """A turn that the engine can take.

    Attributes:
        turn: what was asked.
        model: who answers.
        rendered: the prompt as text.
        request: for the engine.
        constraint: how the answer is written.
    """

    turn: TurnRequest
    model: GenerationModel
    rendered: str
    request: GenerateRequest
    constraint: Constraint

    @property
    def tool_format(self) -> ToolFormat | None:
        """Notation of tool calls in the answer; None where there are none."""
        return self.constraint.tool_format

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as tokens."""
        return self.request.prompt_ids

    def parsers(self) -> Sequence[TurnParser]:
        """Fresh parsers, one per sample; made when that sample begins."""
        return LazySequence(self.request.params.n, lambda _index: self._parser())

    def stream(self) -> TurnStream:
        """Return the stream that takes in the engine's events."""
        return TurnStream(
            self.parsers(),
            len(self.prompt_ids) + num_source_tokens(self.request.inputs),
            num_image_tokens=num_image_tokens(self.request.inputs),
            max_calls=None if self.turn.parallel_tool_calls else 1,
            stop_ids=self.turn.params.stop_token_ids,
        )

    def _parser(self) -> TurnParser:
        reasoning = _reasoning_format(self.turn, self.model)
        grammar, form = self.constraint.grammar, self.tool_format
        if grammar is None or not self.constraint.is_structure:
            return self._parser_of(form, reasoning)
        answer = ContentParser()
        if form is not None:
            calls = self._parser_of(form, None)
            starts = self.constraint.call_starts
            answer = ParserByStart(starts, calls, answer) if starts else calls
        if grammar.begins_after is None:
            return answer
        free = ParsersInTurn(self._parser_of(None, reasoning), grammar.begins_after, answer)
        return ParserByStart(grammar.free_starts, free, answer) if grammar.free_starts else free

    def _parser_of(
        self, tool_format: ToolFormat | None, reasoning: ReasoningFormat | None
    ) -> TurnParser:
        turn = self.turn
        return turn_parser(
            tool_format=tool_format,
            reasoning_format=reasoning,
            tools=[tool.for_template() for tool in turn.callable_tools],
            reasoning_is_open=reasoning is not None
            and reasoning.is_open_after(self.rendered, turn.begun),
            is_token=lambda text: self.model.tokenizer.token_id(text) is not None,
            is_forced=turn.tool_choice.mode is ToolMode.REQUIRED and tool_format is not None,
        )


async def prepare_turn(
    turn: TurnRequest, model: GenerationModel, images: Images | None = None
) -> PreparedTurn:
    """Render and encode the conversation; decide how the answer is constrained and read.

    Args:
        turn: what is asked.
        model: who answers.
        images: prepares those of the conversation; None: it has none.

    Raises:
        InvalidRequestError: a message is malformed, the template refuses the conversation, the
            model cannot answer as it is asked to, or an image cannot be read.
        ContextLengthError: it is longer than the model's context.
    """
    limit = None
    if not model.takes_sources:
        limit = prompt_limit(
            turn.truncate,
            turn.truncation_side,
            max_tokens=turn.params.max_tokens,
            max_model_len=model.info.max_model_len,
        )
    prompt = await render_turn(turn, model, limit=limit, images=images, marks=model.turn_marks)
    rendered = prompt.text
    # A request may ask for thinking by the template's own name.
    turn = replace(turn, template_kwargs=model.tokenizer.template_variables(turn.template_kwargs))
    constraint = await constrain(turn, model, rendered)
    request = GenerateRequest(
        request_id=turn.request_id,
        model=model.names[0],
        prompt_ids=prompt.token_ids,
        inputs=prompt.inputs,
        turn_start=prompt.turn_start,
        answer_start=prompt.answer_start,
        params=_params(turn, model, constraint, prompt),
        priority=turn.priority,
        client=turn.client,
        cache_salt=turn.cache_salt,
    )
    return PreparedTurn(
        turn=turn,
        model=model,
        rendered=rendered,
        request=request,
        constraint=constraint,
    )


async def render_turn(
    turn: TurnRequest,
    model: GenerationModel,
    *,
    limit: TokenLimit | None = None,
    images: Images | None = None,
    marks: SpecialTokens | None = None,
) -> ImagePrompt:
    """Return the conversation as text and as tokens; off the event loop where it is long.

    Args:
        turn: has the conversation.
        model: whose template and tokenizer.
        limit: see ``Tokenizer.encode``; one that cuts leaves no more tokens than it says.
        images: prepares those of the conversation; None refuses them.
        marks: find where the latest turn of the user begins; None: it is not wanted.

    Raises:
        InvalidRequestError: a message is malformed, or the template refuses the conversation.
        ContextLengthError: it has more tokens than ``limit`` allows.
    """
    sources = image_sources(turn.messages)
    if sources and images is None:
        raise InvalidRequestError("This route takes no images.", param=sources[0].param)
    if sources and images is not None:
        return await _render_with_images(turn, model, images, limit, marks)
    tools = _tools(turn)
    length = _length(turn.messages, tools)
    if model.takes_sources:
        return await maybe_in_thread(lambda: _source(turn, model, limit), length)

    def render() -> ImagePrompt:
        prompt = text_prompt(
            template_messages(turn.messages, id_length=model.call_id_length),
            model.images,
            render=partial(_text, turn, model),
            encode=lambda text: model.tokenizer.encode(text, add_special_tokens=False, limit=limit),
            # What is cut may have another beginning.
            marks=None if limit is not None and limit.cuts else marks,
        )
        ids = prompt.token_ids
        if limit is None or not limit.cuts or limit.most is None or len(ids) <= limit.most:
            return prompt
        ids = cut_ids(ids, limit.most, from_left=limit.from_left)
        return ImagePrompt(model.tokenizer.decode(ids, skip_special_tokens=False), ids)

    return await maybe_in_thread(render, length)


def _source(turn: TurnRequest, model: GenerationModel, limit: TokenLimit | None) -> ImagePrompt:
    """Return a conversation as the source of an encoder-decoder."""
    messages = template_messages(turn.messages, id_length=model.call_id_length)
    text = _text(turn, model, messages, as_it_is)
    form = SourceForm(
        truncate=turn.truncate,
        from_left=turn.truncation_side == "left",
        # The template writes them, as for decoders.
        add_special_tokens=False,
        param="messages",
    )
    return read_source(text, model, form, limit=limit)._replace(text=text)


async def _render_with_images(
    turn: TurnRequest,
    model: GenerationModel,
    images: Images,
    limit: TokenLimit | None,
    marks: SpecialTokens | None,
) -> ImagePrompt:
    """Return a conversation with images as text, as tokens, and its images."""
    if turn.truncate is not None:
        raise unsupported("A prompt with images is not cut.", "truncate_prompt_tokens")
    sources = image_sources(turn.messages)
    prepared = await images.prepare(
        sources, model, turn.pixel_range, is_counted=limit is not None and limit.most is None
    )
    form = model.images
    assert form is not None, "a model without images has refused them"
    return await in_thread(
        lambda: image_prompt(
            template_messages(turn.messages, id_length=model.call_id_length),
            prepared,
            form,
            render=partial(_text, turn, model),
            encode=lambda text: model.tokenizer.encode(text, add_special_tokens=False, limit=limit),
            marks=marks,
        )
    )


def _text(turn: TurnRequest, model: GenerationModel, messages: Messages, hide: Hide) -> str:
    """Return what the chat template makes of messages; see ``images.prompt.Render``."""
    return model.tokenizer.render_chat(
        messages,
        tools=hide(_tools(turn)),
        add_generation_prompt=turn.add_generation_prompt and not turn.continue_final_message,
        continue_final_message=turn.continue_final_message,
        template_kwargs=hide(model.template_variables(turn.template_kwargs)),
    )


def _tools(turn: TurnRequest) -> list[dict[str, Any]] | None:
    return [tool.for_template() for tool in turn.shown_tools] or None


def _reasoning_format(turn: TurnRequest, model: GenerationModel) -> ReasoningFormat | None:
    return model.reasoning_format if turn.separate_reasoning else None


def _params(
    turn: TurnRequest, model: GenerationModel, constraint: Constraint, prompt: ImagePrompt
) -> SamplingParams:
    """Return the engine's parameters: the text has the tokens that its parser reads."""
    formats = [constraint.tool_format, _reasoning_format(turn, model)]
    forms = [form for form in formats if form is not None]
    markers = tuple(marker for form in forms for marker in form.markers)
    params = replace(
        turn.params,
        shown_token_ids=_ids(_tokens_in(markers, model.tokenizer.special_tokens), model),
        hidden_token_ids=_ids([marker for form in forms for marker in form.silent], model),
        grammar=constraint.grammar,
        stop_token_ids=_stop_ids(turn, model, constraint),
        thinking_budget=_thinking_budget(turn, model, prompt.text),
    )
    if not model.takes_sources:
        return params
    named = ["max_tokens"] * (params.max_tokens is not None)
    named += ["min_tokens"] * (params.min_tokens > 0)
    return source_params(params, model, len(prompt.token_ids), named=named)


@lru_cache(maxsize=256)
def _tokens_in(markers: tuple[str, ...], special_tokens: frozenset[str]) -> tuple[str, ...]:
    """Return the special tokens that markers consist of; a marker may be several."""
    is_part = (token for token in special_tokens if any(token in marker for marker in markers))
    return tuple(sorted(is_part))


def _ids(texts: Sequence[str], model: GenerationModel) -> tuple[int, ...]:
    """Return the ids of the texts that are one token each, without repetition."""
    token_ids = (model.tokenizer.token_id(text) for text in dict.fromkeys(texts))
    return tuple(token_id for token_id in token_ids if token_id is not None)


def _stop_ids(turn: TurnRequest, model: GenerationModel, constraint: Constraint) -> tuple[int, ...]:
    """Return the caller's stop tokens, and those after which the model waits for tools' results."""
    form = constraint.tool_format
    texts = () if form is None else form.stop_texts
    token_ids = (model.tokenizer.token_id(text) for text in texts)
    known = {*turn.params.stop_token_ids, *model.tokenizer.eos_ids}
    new = tuple(
        token_id for token_id in token_ids if token_id is not None and token_id not in known
    )
    return turn.params.stop_token_ids + new


def _thinking_budget(
    turn: TurnRequest, model: GenerationModel, rendered: str
) -> ThinkingBudget | None:
    """Return what limits the reasoning; a model that marks none needs no limit."""
    form = model.reasoning_format
    if turn.thinking_budget is None or form is None:
        return None
    end_id = model.tokenizer.token_id(form.end)
    if end_id is None or form.is_harmony:
        raise unsupported(
            "This model ends its reasoning with more than one token.", "thinking_token_budget"
        )
    return ThinkingBudget(
        tokens=turn.thinking_budget,
        end_id=end_id,
        start_id=model.tokenizer.token_id(form.start),
        is_open=form.is_open_after(rendered, turn.begun),
    )


def _length(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> int:
    """About how many characters there are to tokenise, or more than long where that is enough."""
    texts = sum(MESSAGE_CHARS + len(message.get("content") or "") for message in messages)
    written = [tools or (), [m["tool_calls"] for m in messages if "tool_calls" in m]]
    return texts + (LONG_TEXT_CHARS + 1 if is_longer(written, LONG_TEXT_CHARS) else 0)


def prompt_limit(
    truncate: int | None,
    side: Literal["left", "right"],
    *,
    max_tokens: int | None,
    max_model_len: int,
) -> TokenLimit | None:
    """Return what a prompt is cut to; None where it is not to be cut.

    Args:
        truncate: so many tokens stay; -1: as many as leave room for ``max_tokens``.
        side: the end of the prompt at which it is cut; "left" keeps its last tokens.
        max_tokens: most tokens to generate; None: one at least.
        max_model_len: prompt and output together.

    Raises:
        InvalidRequestError: the tokens that are to stay leave no room for those to generate.
    """
    if truncate is None:
        return None
    room = max_model_len - (1 if max_tokens is None else max_tokens)
    if room < 1 or not (truncate == -1 or 1 <= truncate <= room):
        raise InvalidRequestError(
            f"{TRUNCATE} is -1 or from 1 to {room}, which is what max_tokens leave of the context."
            if room >= 1
            else f"max_tokens leave no room for a prompt in a context of {max_model_len} tokens.",
            param=TRUNCATE if room >= 1 else "max_tokens",
        )
    most = room if truncate == -1 else truncate
    return TokenLimit(most=most, cuts=True, from_left=side == "left")
