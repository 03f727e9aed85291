"""``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import Request, Response

from mlx_parallm.api.chat.answer import ChatAnswer
from mlx_parallm.api.chat.request import chat_turn
from mlx_parallm.api.chat.schema import ChatRequest
from mlx_parallm.api.control.art.spans import PolicySpans
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.turns.answer import AnswerHead
from mlx_parallm.api.turns.fingerprint import system_fingerprint
from mlx_parallm.api.turns.logprobs import TokenNames
from mlx_parallm.api.turns.prelude import Admitted, PreludeDep
from mlx_parallm.api.turns.prepare import PreparedTurn, prepare_turn
from mlx_parallm.api.turns.respond import respond

routes = Routes(CHAT, body_limit=INPUT, short=True)


@routes.post("/v1/chat/completions", batchable=True, responses=STREAMED)
async def create_chat_completion(
    body: ChatRequest, request: Request, prelude: PreludeDep
) -> Response:
    """Continue a conversation."""
    admitted = await prelude.admit(body.model, n=body.n)
    turn = chat_turn(
        body,
        request_id=f"chatcmpl-{body.request_id or prelude.answer_id}",
        client=admitted.client,
        max_logprobs=admitted.config.max_logprobs,
    )
    prepared = await prepare_turn(turn, admitted.model)
    head = AnswerHead(
        id=turn.request_id,
        object="chat.completion.chunk" if body.stream else "chat.completion",
        model=admitted.name,
        fingerprint=system_fingerprint(admitted.engine, admitted.model),
    )
    names = TokenNames(admitted.model.tokenizer, as_ids=body.return_tokens_as_token_ids)
    answer = ChatAnswer(body, head, names, prepared, _spans(body, request, admitted, prepared))
    generation = await admitted.start([prepared.request], _fields(body))
    return await respond(request, generation, answer, stream=body.stream, config=admitted.config)


def _spans(
    body: ChatRequest, request: Request, admitted: Admitted, prepared: PreparedTurn
) -> PolicySpans | None:
    """What tells ART's policies, where the body asks for them."""
    if not body.wants_policies:
        return None
    model, control = prepared.model, admitted.engine.control
    versions = {one.name: one.version for one in control.adapters()}
    base = control.version(model.parent or model.names[0]).label
    return PolicySpans(
        policies=request.app.state.policies,
        slot=model.adapter or admitted.name,
        label=versions.get(model.adapter or "", base),
        num_prompt_tokens=len(prepared.prompt_ids),
    )


def _fields(body: ChatRequest) -> dict[str, str]:
    """What this body calls the engine's names."""
    fields = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    return fields
