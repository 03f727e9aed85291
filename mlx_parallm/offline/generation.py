"""The prompts and requests of ``LLM`` for a model that generates."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeGuard, TypeVar

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.model_files import model_folder
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.grammar.structured_outputs import structured_outputs_spec
from mlx_parallm.images.prompt import ImagePrompt, text_prompt
from mlx_parallm.offline.completions import Ended, OutputReader, RequestOutput
from mlx_parallm.offline.engine import OfflineEngine
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.tokenizer.loaded import HubTokenizer
from mlx_parallm.types.errors import InvalidRequestError, ParallmError
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.request import GenerateRequest, SamplingParams

Prompt = str | Sequence[int]
#: ``PromptMapping``: vLLM's form of a prompt, which may have images.
PromptMapping = Mapping[str, Any]
Message = Mapping[str, Any]
T = TypeVar("T")


def part(name: str) -> Any:
    """Return a module of ``offline``, of which each caller needs few: they import much."""
    return importlib.import_module(f"mlx_parallm.offline.{name}")


def plain_prompt(
    prompt: Prompt | PromptMapping, model: Callable[[], GenerationModel]
) -> Prompt | ImagePrompt:
    """Return a prompt; that of vLLM's mapping has its images, or its source."""
    if not isinstance(prompt, Mapping):
        return prompt
    if model().takes_sources:
        return source_prompt(prompt, model())
    plain: Prompt | ImagePrompt = part("images").mapped_prompt(prompt, model())
    return plain


def source_prompt(prompt: Prompt | PromptMapping, model: GenerationModel) -> ImagePrompt:
    """Return a prompt of an encoder-decoder."""
    read: ImagePrompt = part("sources").source_prompt(prompt, model)
    return read


def chat_prompt(
    conversation: Sequence[Message],
    model: GenerationModel,
    options: Mapping[str, Any],
    sizes: Mapping[str, Any] | None,
) -> Prompt | ImagePrompt:
    """Return the prompt of a conversation; ``options`` are those of its template."""
    is_plain = not any(
        isinstance(message.get("content"), list) or message.get("tool_calls")
        for message in conversation
    )
    if is_plain and model.takes_sources:
        return part("sources").conversation_prompt(conversation, model, **options)
    if is_plain and model.images is None:
        tokenizer = model.tokenizer
        return text_prompt(
            conversation,
            None,
            render=lambda messages, _: tokenizer.render_chat(messages, **options),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            marks=model.turn_marks,
        )
    return part("images").chat_prompt(conversation, model, sizes, **options)


def compiled(spec: GrammarSpec, model: GenerationModel) -> Grammar:
    """Return a grammar for a model's tokens; raise InvalidRequestError if it cannot be enforced."""
    assert model.grammars is not None, "a loaded model has a compiler"
    return Grammar(text=model.grammars.compile(spec))


def hub_tokenizer(model: ModelConfig) -> HubTokenizer:
    """Return transformers' tokenizer; raise ModelLoadError if it cannot be loaded."""
    # It brings transformers.
    loading = importlib.import_module("mlx_parallm.tokenizer.loading")
    tokenizer: HubTokenizer = loading.load_hub_tokenizer(
        model_folder(model, ignore_progress),
        chat_template=model.chat_template,
        trust_remote_code=model.trust_remote_code,
    )
    return tokenizer


class OfflineRequests:
    """Makes requests of prompts, each with an id of its own."""

    def __init__(self) -> None:
        self._ids = count()

    def make(
        self,
        items: Sequence[Prompt | ImagePrompt],
        model: Callable[[], GenerationModel],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
    ) -> list[tuple[str | None, GenerateRequest]]:
        """Return a request for each prompt, with its text if it came as one.

        ``model`` raises InvalidRequestError if the model cannot generate.
        """
        params = per_prompt(sampling_params or SamplingParams(), len(items), "sampling_params")
        adapters = per_prompt(adapter, len(items), "adapter")
        return [
            (item if isinstance(item, str) else None, self._request(item, model(), each, name))
            for item, each, name in zip(items, params, adapters, strict=True)
        ]

    def _request(
        self,
        prompt: Prompt | ImagePrompt,
        model: GenerationModel,
        params: SamplingParams,
        adapter: str | None,
    ) -> GenerateRequest:
        if isinstance(prompt, ImagePrompt):
            read = prompt
        elif model.takes_sources:
            read = source_prompt(prompt, model)
        else:
            ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            read = ImagePrompt("", tuple(ids))
        params = _with_grammar(params, model)
        if model.takes_sources:
            params = part("sources").with_lengths(params, model, len(read.token_ids))
        return GenerateRequest(
            request_id=f"offline-{next(self._ids)}",
            model=model.names[0],
            prompt_ids=read.token_ids,
            params=params,
            adapter=adapter,
            inputs=read.inputs,
            turn_start=read.turn_start,
            answer_start=read.answer_start,
        )


def _with_grammar(params: SamplingParams, model: GenerationModel) -> SamplingParams:
    """Return parameters whose ``structured_outputs`` is compiled."""
    if params.structured_outputs is None:
        return params
    spec = structured_outputs_spec(params.structured_outputs, param="structured_outputs")
    if spec is None:
        raise InvalidRequestError(
            "structured_outputs names nothing to match.", param="structured_outputs"
        )
    try:
        return replace(params, structured_outputs=None, grammar=compiled(spec, model))
    except InvalidRequestError as refusal:
        refusal.param = "structured_outputs"
        raise


def run(
    requests: Sequence[tuple[str | None, GenerateRequest]],
    engine: OfflineEngine,
    on_finish: Callable[[RequestOutput], None] | None,
) -> list[RequestOutput]:
    """Return the output of each request, in order; ``on_finish`` is called with each as it ends."""
    ended: SimpleQueue[Ended] = SimpleQueue()
    readers = [OutputReader(text, request, ended) for text, request in requests]
    outputs: dict[str, RequestOutput] = {}
    try:
        engine.call(lambda client: _admit(client, readers))
        for _ in readers:
            output = _next(ended)
            outputs[output.request_id] = output
            if on_finish is not None:
                on_finish(output)
    except BaseException:
        # They must not meet those of the next call.
        with suppress(ParallmError):
            engine.call(lambda client: _abort(client, readers))
        raise
    return [outputs[request.request_id] for _, request in requests]


def _next(ended: SimpleQueue[Ended]) -> RequestOutput:
    """Wait for the next request to end; return its output, or raise what it failed with."""
    output = ended.get()
    if isinstance(output, ParallmError):
        raise output
    return output


async def _admit(client: AsyncEngine, readers: Sequence[OutputReader]) -> None:
    """Submit the requests of readers; raise the first refusal, and then none has begun."""
    if len(readers) < 2:
        for reader in readers:
            await client.open_reader(reader.request, reader)
        return
    # All begin in one step: which sequences share a step, and so the last digits, do not vary.
    await client.control.pause(PauseMode.KEEP)
    try:
        results = await asyncio.gather(
            *(client.open_reader(reader.request, reader) for reader in readers),
            return_exceptions=True,
        )
        for refusal in results:
            if isinstance(refusal, BaseException):
                await _abort(client, readers)
                raise refusal
    finally:
        await client.control.resume()


async def _abort(client: AsyncEngine, readers: Sequence[OutputReader]) -> None:
    """End the requests of readers that have not ended."""
    for reader in readers:
        await client.abort(reader.request.request_id)


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
