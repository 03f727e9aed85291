"""The prompts and requests of ``LLM`` for a model that generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any

from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.grammar.structured_outputs import structured_outputs_spec
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.offline.arguments import per_prompt
from mlx_parallm.offline.completions import RequestOutput, apply, empty_output
from mlx_parallm.offline.engines import OfflineEngines
from mlx_parallm.offline.opening import part
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest, Grammar, SamplingParams

Prompt = str | Sequence[int]
#: ``PromptMapping``: vLLM's form of a prompt, which may have images.
PromptMapping = Mapping[str, Any]
Message = Mapping[str, Any]


def plain_prompt(
    prompt: Prompt | PromptMapping, model: Callable[[], GenerationModel]
) -> Prompt | ImagePrompt:
    """Return a prompt; that of vLLM's mapping has its images."""
    if not isinstance(prompt, Mapping):
        return prompt
    plain: Prompt | ImagePrompt = part("images").mapped_prompt(prompt, model())
    return plain


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
    if is_plain and model.images is None:
        return model.tokenizer.encode_chat(conversation, **options)
    return part("images").chat_prompt(conversation, model, sizes, **options)


def compiled(spec: GrammarSpec, model: GenerationModel) -> Grammar:
    """Return a grammar for a model's tokens; raise InvalidRequestError if it cannot be enforced."""
    assert model.grammars is not None, "a loaded model has a compiler"
    return Grammar(text=model.grammars.compile(spec))


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
            ids, inputs = prompt.token_ids, prompt.inputs
        else:
            ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            inputs = ()
        return GenerateRequest(
            request_id=f"offline-{next(self._ids)}",
            model=model.names[0],
            prompt_ids=tuple(ids),
            params=_with_grammar(params, model),
            adapter=adapter,
            inputs=inputs,
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
    engines: OfflineEngines,
    on_finish: Callable[[RequestOutput], None] | None,
) -> list[RequestOutput]:
    """Return the output of each request, in order; ``on_finish`` is called with each as it ends."""
    outputs = {request.request_id: empty_output(text, request) for text, request in requests}
    with closing(engines.events([request for _, request in requests])) as events:
        for event in events:
            done = apply(event, outputs[event.request_id])
            if done and on_finish is not None:
                on_finish(outputs[event.request_id])
    return list(outputs.values())
