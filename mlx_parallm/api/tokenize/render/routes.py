"""``POST /v1/chat/completions/render``, ``/v1/completions/render``, ``/apply-template``."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import Request

from mlx_parallm.api.chat.request import chat_turn
from mlx_parallm.api.chat.schema import ChatRequest, check_template_kwargs, turns_of
from mlx_parallm.api.completions.routes import prepare_completion
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import ClientDep, ConfigDep, EngineDep
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.http.openapi import TOKENS
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.tokenize.render.schema import AppliedTemplate, RenderedRequest, TemplateRequest
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.api.turns.model_choice import generator
from mlx_parallm.api.turns.prepare import prepare_turn
from mlx_parallm.types.request import GenerateRequest

routes = Routes(TOKENS, body_limit=INPUT, short=True)


@routes.post("/v1/chat/completions/render")
async def render_chat_completion(
    body: ChatRequest, request: Request, engine: EngineDep, config: ConfigDep, client: ClientDep
) -> RenderedRequest:
    """What a chat request would give the engine."""
    turn = chat_turn(
        body,
        request_id=f"chatcmpl-{body.request_id or request.state.answer_id}",
        client=client,
        max_logprobs=config.max_logprobs,
    )
    prepared = await prepare_turn(turn, generator(engine, body.model)[1])
    return _rendered(prepared.request, prepared.rendered)


@routes.post("/v1/completions/render")
async def render_completion(
    body: CompletionRequest,
    request: Request,
    engine: EngineDep,
    config: ConfigDep,
    client: ClientDep,
) -> list[RenderedRequest]:
    """What a completion request would give the engine, for each prompt."""
    asked, prompts = await prepare_completion(
        body,
        generator(engine, body.model)[1],
        config,
        name=f"cmpl-{body.request_id or request.state.answer_id}",
        client=client,
    )
    return [_rendered(one, text) for one, (text, _) in zip(asked, prompts, strict=True)]


@routes.post("/apply-template", short=False)
async def apply_template(body: TemplateRequest, engine: EngineDep) -> AppliedTemplate:
    """A conversation as the model would read it."""
    _, model = generator(engine, body.model)
    check_template_kwargs(body.chat_template_kwargs)
    messages = template_messages(turns_of(body.messages), id_length=model.call_id_length)

    def render() -> str:
        return model.tokenizer.render_chat(
            messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs={**model.chat_template_kwargs, **body.chat_template_kwargs},
        )

    length = sum(len(message.get("content") or "") for message in messages)
    return AppliedTemplate(prompt=await maybe_in_thread(render, length))


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
