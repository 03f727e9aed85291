"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlx_parallm.api import sse
from mlx_parallm.api.auth import client_of
from mlx_parallm.api.convert.answer import AnswerHead
from mlx_parallm.api.convert.chat import ChatAnswer
from mlx_parallm.api.convert.logprobs import TokenNames
from mlx_parallm.api.convert.prompts import encode_chat, splitters
from mlx_parallm.api.convert.sampling import sampling_params
from mlx_parallm.api.dependencies import ConfigDep, EngineDep
from mlx_parallm.api.errors import body_of
from mlx_parallm.api.generation import Generation, unless_disconnected
from mlx_parallm.api.schemas.chat import ChatRequest
from mlx_parallm.config import ServerConfig
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.errors import ParallmError
from mlx_parallm.request import GenerateRequest

router = APIRouter()


@router.post("/chat/completions")
async def create_chat_completion(
    body: ChatRequest, request: Request, engine: EngineDep, config: ConfigDep
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
    generation = await Generation.start(engine, [asked])
    if body.stream:
        return await _stream(generation, answer, config)
    return await unless_disconnected(request, _collect(generation, answer))


def _request(
    body: ChatRequest,
    request: Request,
    model: ServedModel,
    prompt_ids: tuple[int, ...],
    config: ServerConfig,
) -> GenerateRequest:
    limit = body.max_completion_tokens
    return GenerateRequest(
        request_id=f"chatcmpl-{body.request_id or request.state.request_id}",
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


async def _collect(generation: Generation, answer: ChatAnswer) -> Response:
    try:
        async for _, event in generation.events():
            answer.add(event)
        return JSONResponse(answer.whole())
    finally:
        await generation.abort()


async def _stream(generation: Generation, answer: ChatAnswer, config: ServerConfig) -> Response:
    try:
        await generation.wait_for_first(config.sse_keep_alive_s)
    except BaseException:
        await generation.abort()
        raise
    return sse.EventStreamResponse(
        _chunks(generation, answer),
        on_close=generation.abort,
        keep_alive_s=config.sse_keep_alive_s,
    )


async def _chunks(generation: Generation, answer: ChatAnswer) -> AsyncIterator[bytes]:
    try:
        yield b"".join(sse.data(chunk) for chunk in answer.opening())
        async for _, event in generation.events():
            for chunk in answer.chunks(event):
                yield sse.data(chunk)
        for chunk in answer.closing():
            yield sse.data(chunk)
    except ParallmError as error:
        yield sse.data(body_of(error))
    yield sse.DONE
