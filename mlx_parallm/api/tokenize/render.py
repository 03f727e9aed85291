"""``POST /v1/chat/completions/render``, ``/v1/completions/render``, ``/apply-template``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, Field, StrictBool, StrictStr

from mlx_parallm.api.chat.request import chat_turn
from mlx_parallm.api.chat.schema import ChatRequest, Messages, turns_of
from mlx_parallm.api.completions.request import completion_requests
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import RequestsDep
from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import TOKENS
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.turns.fields import TemplateKwargs
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.api.turns.prelude import PreludeDep, generator
from mlx_parallm.api.turns.prepare import prepare_turn
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest

routes = Routes(TOKENS, body_limit=INPUT, short=True, in_any_process=True)


class RenderedRequest(BaseModel):
    """The engine's request for one prompt, in vLLM's names."""

    request_id: str = Field(description="The id of the engine's request.")
    model: str = Field(description="The model's first name.")
    prompt: str = Field(description="The prompt's text; empty if it came as token ids.")
    token_ids: list[int] = Field(description="The prompt's token ids.")
    sampling_params: dict[str, Any] = Field(description="How tokens would be chosen.")
    priority: int = Field(description="Lower runs first.")
    cache_salt: str | None = Field(description="Share cached prefixes only with the same salt.")


class TemplateRequest(NullIsAbsent):
    """llama.cpp's body of ``/apply-template``."""

    model: StrictStr | None = Field(None, description="Default: the first model.")
    messages: Messages = Field(description="A conversation.")
    tools: list[dict[str, Any]] | None = Field(None, description="Tools for the template.")
    add_generation_prompt: StrictBool = Field(True, description="Open the assistant's turn.")
    chat_template_kwargs: TemplateKwargs


class AppliedTemplate(BaseModel):
    """llama.cpp's answer of ``/apply-template``."""

    prompt: str = Field(description="The conversation as text.")


@routes.post("/v1/chat/completions/render")
async def render_chat_completion(body: ChatRequest, prelude: PreludeDep) -> RenderedRequest:
    """Return the engine's request for a chat request, without running it."""
    _, model = generator(prelude.engine, body.model)
    turn = await prelude.on_body(lambda: chat_turn(body, prelude))
    prepared = await prepare_turn(turn, model)
    return _rendered(prepared.request, prepared.rendered)


@routes.post("/v1/completions/render")
async def render_completion(body: CompletionRequest, prelude: PreludeDep) -> list[RenderedRequest]:
    """Return the engine's request for each prompt of a completion request, without running it."""
    if body.embeds():
        raise InvalidRequestError(
            "prompt_embeds cannot be rendered, because they have no tokens.", param="prompt_embeds"
        )
    _, model = generator(prelude.engine, body.model)
    answer_id = f"cmpl-{body.request_id or prelude.answer_id}"
    requests, prompts = await completion_requests(body, prelude, model, answer_id=answer_id)
    return [_rendered(each, prompt.text) for each, prompt in zip(requests, prompts, strict=True)]


@routes.post("/apply-template", short=False)
async def apply_template(body: TemplateRequest, engine: RequestsDep) -> AppliedTemplate:
    """Return a conversation as the chat template renders it."""
    _, model = generator(engine, body.model)

    def render() -> str:
        return model.tokenizer.render_chat(
            template_messages(turns_of(body.messages), id_length=model.call_id_length),
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=model.template_variables(body.chat_template_kwargs),
        )

    return AppliedTemplate(prompt=await in_thread(render))


def _rendered(request: GenerateRequest, prompt: str) -> RenderedRequest:
    return RenderedRequest(
        request_id=request.request_id,
        model=request.model,
        prompt=prompt,
        token_ids=list(request.prompt_ids),
        sampling_params=asdict(request.params),
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
