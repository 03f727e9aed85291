"""``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from mlx_parallm.api.auth import client_of
from mlx_parallm.api.convert.answer import AnswerHead
from mlx_parallm.api.convert.chat import ChatAnswer
from mlx_parallm.api.convert.logprobs import TokenNames
from mlx_parallm.api.convert.prompts import encode_chat, splitters
from mlx_parallm.api.convert.sampling import sampling_params
from mlx_parallm.api.dependencies import (
    ConfigDep,
    EngineDep,
    MaxWaitingDep,
    refuse_lone_surrogates,
)
from mlx_parallm.api.generation import Generation
from mlx_parallm.api.respond import respond
from mlx_parallm.api.schemas.chat import ChatRequest
from mlx_parallm.config import ServerConfig
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.request import GenerateRequest

router = APIRouter(dependencies=[Depends(refuse_lone_surrogates)])


@router.post("/chat/completions")
async def create_chat_completion(
    body: ChatRequest,
    request: Request,
    engine: EngineDep,
    config: ConfigDep,
    max_waiting: MaxWaitingDep,
) -> Response:
    """Continue a conversation."""
    body.check_supported()
    model = engine.get_model(body.model)
    rendered, prompt_ids = await encode_chat(body, model.tokenizer)
    asked = _request(body, request, model, prompt_ids, config)
    head = AnswerHead(
        id=asked.request_id,
        object="chat.completion.chunk" if body.stream else "chat.completion",
        model=body.model,
    )
    names = TokenNames(model.tokenizer, as_ids=body.return_tokens_as_token_ids)
    answer = ChatAnswer(body, head, names, prompt_ids, splitters(body, model.tokenizer, rendered))
    generation = await Generation.start(
        engine, [asked], fields=_fields(body), max_waiting=max_waiting
    )
    return await respond(
        request, generation, answer, stream=body.stream, keep_alive_s=config.sse_keep_alive_s
    )


def _request(
    body: ChatRequest,
    request: Request,
    model: ServedModel,
    prompt_ids: tuple[int, ...],
    config: ServerConfig,
) -> GenerateRequest:
    limit = body.max_completion_tokens
    return GenerateRequest(
        request_id=f"chatcmpl-{body.request_id or request.state.answer_id}",
        model=model.names[0],
        prompt_ids=prompt_ids,
        params=sampling_params(
            body,
            max_tokens=body.max_tokens if limit is None else limit,
            logprobs=body.top(),
            prompt_logprobs=body.prompt_logprobs,
            max_logprobs=config.max_logprobs,
        ),
        priority=body.priority,
        client=client_of(request.headers, config),
        cache_salt=body.cache_salt,
    )


def _fields(body: ChatRequest) -> dict[str, str]:
    """What this body calls the engine's names."""
    fields = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    return fields
