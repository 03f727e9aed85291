"""``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import Request, Response

from mlx_parallm.api.auth import client_of
from mlx_parallm.api.convert.answer import AnswerHead
from mlx_parallm.api.convert.chat import ChatAnswer
from mlx_parallm.api.convert.chat_turn import chat_turn
from mlx_parallm.api.convert.logprobs import TokenNames
from mlx_parallm.api.declared import INPUT
from mlx_parallm.api.dependencies import (
    ConfigDep,
    EngineDep,
    MaxWaitingDep,
)
from mlx_parallm.api.fingerprint import system_fingerprint
from mlx_parallm.api.generation import Generation, check_queue
from mlx_parallm.api.in_flight.spans import PolicySpans
from mlx_parallm.api.model_choice import generator
from mlx_parallm.api.openapi import CHAT
from mlx_parallm.api.respond import respond
from mlx_parallm.api.routing import Routes
from mlx_parallm.api.schemas.chat import ChatRequest
from mlx_parallm.api.sse import STREAMED
from mlx_parallm.api.turns.prepare import PreparedTurn, prepare_turn
from mlx_parallm.serving.interface import EngineClient

routes = Routes(CHAT, body_limit=INPUT, short=True)


@routes.post("/v1/chat/completions", batchable=True, responses=STREAMED)
async def create_chat_completion(
    body: ChatRequest,
    request: Request,
    engine: EngineDep,
    config: ConfigDep,
    max_waiting: MaxWaitingDep,
) -> Response:
    """Continue a conversation."""
    name, model = generator(engine, body.model)
    turn = chat_turn(
        body,
        request_id=f"chatcmpl-{body.request_id or request.state.answer_id}",
        client=client_of(request.headers, config),
        max_logprobs=config.max_logprobs,
    )
    await check_queue(engine, name, turn.client, n=body.n, max_waiting=max_waiting)
    prepared = await prepare_turn(turn, model)
    head = AnswerHead(
        id=turn.request_id,
        object="chat.completion.chunk" if body.stream else "chat.completion",
        model=name,
        fingerprint=system_fingerprint(engine, model),
    )
    names = TokenNames(model.tokenizer, as_ids=body.return_tokens_as_token_ids)
    answer = ChatAnswer(body, head, names, prepared, _spans(body, request, engine, prepared, name))
    generation = await Generation.start(
        engine, [prepared.request], fields=_fields(body), max_waiting=max_waiting
    )
    return await respond(request, generation, answer, stream=body.stream, config=config)


def _spans(
    body: ChatRequest, request: Request, engine: EngineClient, prepared: PreparedTurn, name: str
) -> PolicySpans | None:
    """What tells ART's policies, where the body asks for them."""
    if not body.wants_policies:
        return None
    model = prepared.model
    versions = {one.name: one.version for one in engine.control.adapters()}
    base = engine.control.version(model.parent or model.names[0]).label
    return PolicySpans(
        policies=request.app.state.policies,
        slot=model.adapter or name,
        label=versions.get(model.adapter or "", base),
        num_prompt_tokens=len(prepared.prompt_ids),
    )


def _fields(body: ChatRequest) -> dict[str, str]:
    """What this body calls the engine's names."""
    fields = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    return fields
