"""From the bodies of Ollama's routes to turns and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_parallm.api.chat.request import chat_tools
from mlx_parallm.api.completions.infill import infill_ids, with_infill_ends
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.ollama.schema import (
    GenerationFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
)
from mlx_parallm.api.turns.constraints import grammar_of
from mlx_parallm.api.turns.fields import (
    BodyValue,
    SamplingFields,
    effort_kwargs,
    sampling_params,
)
from mlx_parallm.api.turns.images import DATA, ImageSource, image_part
from mlx_parallm.api.turns.prelude import Prelude, refuse_sources
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.stream import TurnStream
from mlx_parallm.api.turns.tools import Tool
from mlx_parallm.api.turns.written_prompts import WrittenPrompt, read_prompts
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.parsing.structured import ContentParser
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping
from mlx_parallm.types.request import GenerateRequest, SamplingParams

# _SAME: options that sampling has by the same names.
_SAME = ("temperature", "top_k", "min_p", "stop", "presence_penalty", "frequency_penalty")
#: ``FIELDS``: what the bodies call the engine's names.
FIELDS = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "logprobs": "top_logprobs",
    **{name: f"options.{name}" for name in (*_SAME, "seed", "top_p")},
}
CHAT_FIELDS = FIELDS | {"prompt": "messages"}
PROMPT_FIELDS = FIELDS | {"messages": "prompt"}


class RawPrompt(NamedTuple):
    """A prompt that is not written by a template.

    Attributes:
        request: for the engine.
        stream: takes in the engine's events.
    """

    request: GenerateRequest
    stream: TurnStream


def chat_turn(body: OllamaChatRequest, prelude: Prelude) -> TurnRequest:
    """Return the turn that a chat asks for.

    Raises:
        InvalidRequestError: a field is malformed, or asks for what is not served; names it.
    """
    return _turn(body, conversation(body.messages), prelude, _tools(body.tools))


def generate_turn(body: OllamaGenerateRequest, prelude: Prelude) -> TurnRequest:
    """Return the turn of one question; see ``chat_turn``."""
    content = _content(body.prompt, body.images, "images")
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return _turn(body, messages, prelude)


def check_template(body: OllamaGenerateRequest) -> None:
    """Raise InvalidRequestError if a body brings a template or tokens of an earlier answer."""
    refusals = {
        "template": "is not served: the server has the template, see --chat-template",
        "context": "is not served: send the conversation to /api/chat",
    }
    for name, why in refusals.items():
        if getattr(body, name):
            raise BodyValue(None, name).refusal(why, unsupported=True)
    if body.suffix and (body.system or body.images):
        raise BodyValue(None, "suffix").refusal("goes with a prompt alone")


async def raw_prompt(
    body: OllamaGenerateRequest, model: GenerationModel, prelude: Prelude
) -> RawPrompt:
    """Return a prompt that is taken as it is, or with a gap that the model fills in.

    Raises:
        InvalidRequestError: a field is malformed, or asks for what is not served; names it.
    """
    refuse_sources(model, model.names[0])
    structure = _structure(body)
    grammar = None if structure is None else await grammar_of(structure, model, param="format")
    params = _params(body, prelude, grammar=grammar)
    prompt = await _written(body, model, prelude)
    request = GenerateRequest(
        request_id=_request_id(prelude),
        model=model.names[0],
        prompt_ids=prompt.token_ids,
        inputs=prompt.inputs,
        params=with_infill_ends(params, model.tokenizer) if body.suffix else params,
        client=prelude.client,
    )
    return RawPrompt(request, TurnStream([ContentParser()], len(prompt.token_ids)))


async def _written(
    body: OllamaGenerateRequest, model: GenerationModel, prelude: Prelude
) -> ImagePrompt:
    """Return the tokens and images of a prompt that is taken as it is, or of one with a gap."""
    if not body.suffix:
        images = _sources(body.images, "images")
        written = WrittenPrompt(prompt=body.prompt, model=model, images=images)
        return (await read_prompts([written], prelude.images))[0]
    ids = await maybe_in_thread(
        lambda: infill_ids(body.prompt, body.suffix, model.tokenizer, add_special_tokens=True),
        len(body.prompt) + len(body.suffix),
    )
    return ImagePrompt("", ids)


def conversation(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages as ``TurnRequest`` takes them.

    Ollama's calls and results have no ids: a result belongs to the first open call of its tool,
    or of any. An empty last message of the assistant is one that has yet to begin.
    """
    turns: list[dict[str, Any]] = []
    calls = _OpenCalls()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        content = _content(_text(message, where), message.images, f"{where}.images")
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking is not None:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            turn["tool_calls"] = calls.named(BodyValue(message.tool_calls, f"{where}.tool_calls"))
        if message.role == "tool":
            turn |= calls.answered(message)
        turns.append(turn)
    while turns and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return turns


class _OpenCalls:
    """The calls of a conversation that have no result yet: ids and names, in order."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}
        self._count = 0

    def named(self, calls: BodyValue) -> list[dict[str, Any]]:
        """Return an assistant's calls, each with an id."""
        return [self._named(call) for call in calls.entries()]

    def _named(self, call: BodyValue) -> dict[str, Any]:
        function = call.object()["function"].object()
        id_ = call["id"].optional_text() or self._new_id()
        self._open[id_] = function["name"].filled_text()
        return {"id": id_, "type": "function", "function": function.value}

    def answered(self, message: OllamaMessage) -> dict[str, Any]:
        """Return the id and the name of the call whose result a message has."""
        fitting = [id_ for id_, name in self._open.items() if name == message.tool_name]
        id_ = message.tool_call_id or next(iter([*fitting, *self._open]), None) or self._new_id()
        name = message.tool_name or self._open.get(id_)
        self._open.pop(id_, None)
        return {"tool_call_id": id_} | ({} if name is None else {"name": name})

    def _new_id(self) -> str:
        self._count += 1
        return f"call_{self._count}"


def _turn(
    body: GenerationFields,
    messages: list[dict[str, Any]],
    prelude: Prelude,
    tools: tuple[Tool, ...] = (),
) -> TurnRequest:
    # Ollama leaves an assistant's last message open.
    last = messages[-1] if messages else {}
    is_continued = last.get("role") == "assistant" and "tool_calls" not in last
    return TurnRequest(
        request_id=_request_id(prelude),
        messages=messages,
        tools=tools,
        structure=_structure(body),
        structure_field="format",
        template_kwargs=_thinking(body.think),
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        params=_params(body, prelude),
        client=prelude.client,
    )


def _request_id(prelude: Prelude) -> str:
    return f"ollama-{prelude.answer_id}"


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if isinstance(think, bool):
        return {"enable_thinking": think}
    return effort_kwargs(think)


def _params(body: GenerationFields, prelude: Prelude, **changes: Any) -> SamplingParams:
    options = body.options
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAME}
    is_seeded = options.seed is not None and options.seed >= 0
    fields["seed"] = options.seed if is_seeded else None
    # Ollama takes 0 for the likeliest token alone.
    fields |= {"top_p": options.top_p} if options.top_p > 0 else {"top_k": 1}
    return sampling_params(
        SamplingFields.model_validate(fields | {"repetition_penalty": options.repeat_penalty}),
        max_logprobs=prelude.config.max_logprobs,
        max_tokens=options.num_predict if options.num_predict > 0 else None,
        logprobs=body.top_logprobs if body.logprobs else None,
        **changes,
    )


def _structure(body: GenerationFields) -> GrammarSpec | None:
    """Return what the answer must match; "" is no format: clients send it."""
    if body.format in (None, ""):
        return None
    if body.format == "json":
        return specs.json_object(param="format")
    if not is_mapping(body.format):
        raise BodyValue(body.format, "format").refusal('must be "json" or a JSON schema')
    return specs.json_schema(body.format, strict=False, param="format")


def _tools(tools: Sequence[dict[str, Any]]) -> tuple[Tool, ...]:
    return chat_tools([{"type": "function"} | tool for tool in tools])


def _text(message: OllamaMessage, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for part in BodyValue(message.content, f"{where}.content").entries():
        if part.type != "text":
            raise part["type"].refusal('must be "text"; images are in the field images')
        texts.append(part["text"].text())
    return "\n".join(texts)


def _content(text: str, images: Sequence[str], where: str) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts = [image_part(source) for source in _sources(images, where)]
    return [*parts, {"type": "text", "text": text}]


def _sources(images: Sequence[str], where: str) -> list[ImageSource]:
    """Return images; some clients send ``data:`` URLs, and Ollama fetches no others."""
    sources: list[ImageSource] = []
    for number, image in enumerate(images):
        param = f"{where}[{number}]"
        is_base64 = not image.startswith(DATA)
        if is_base64 and ":" in image:
            raise InvalidRequestError(f"{param} must be base64.", param=param)
        sources.append(ImageSource(param=param, url=image, is_base64=is_base64))
    return sources
