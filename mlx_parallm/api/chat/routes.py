"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from mlx_parallm.api.chat.answer import ChatAnswer
from mlx_parallm.api.chat.keeping import keeping
from mlx_parallm.api.chat.request import chat_turn
from mlx_parallm.api.chat.schema import ChatRequest
from mlx_parallm.api.control.art.policies import PolicySpans
from mlx_parallm.api.http.declared import COUNT, INPUT
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.turns.images import image_sources
from mlx_parallm.api.turns.prelude import Admitted, PreludeDep, generator
from mlx_parallm.api.turns.prepare import PreparedTurn, prepare_turn, render_turn
from mlx_parallm.api.turns.sources import num_prompt_tokens
from mlx_parallm.api.turns.stream import respond
from mlx_parallm.types.token_limit import ANY_LENGTH

routes = Routes(CHAT, body_limit=INPUT, short=True, in_any_process=True)


@routes.post("/v1/chat/completions", batchable=True, responses=STREAMED)
async def create_chat_completion(body: ChatRequest, prelude: PreludeDep) -> Response:
    """Continue a conversation."""
    admitted = await prelude.admit(body.model, n=body.n, takes_sources=True)
    turn = await prelude.on_body(lambda: chat_turn(body, prelude))
    prepared = await prepare_turn(turn, admitted.model, prelude.images)
    keep = keeping(body, prelude)
    answer = ChatAnswer(body, admitted, prepared, _spans(body, admitted, prepared), keep)
    generation = await admitted.start([prepared.request], body_fields(body))
    return await respond(prelude, generation, answer, stream=body.stream)


@routes.post("/v1/chat/completions/input_tokens", body_limit=COUNT)
async def count_input_tokens(body: ChatRequest, prelude: PreludeDep) -> dict[str, Any]:
    """Count the tokens of a chat request's prompt, in llama.cpp's form; nothing is generated."""
    _, model = generator(prelude.engine, body.model, takes_sources=True)
    turn = await prelude.on_body(lambda: chat_turn(body, prelude))
    await prelude.check_texts(source.url for source in image_sources(turn.messages))
    prompt = await render_turn(turn, model, limit=ANY_LENGTH, images=prelude.images)
    return {"object": "response.input_tokens", "input_tokens": num_prompt_tokens(prompt)}


def _spans(body: ChatRequest, admitted: Admitted, prepared: PreparedTurn) -> PolicySpans | None:
    """Return the recorder of ART's policies, if the body wants them."""
    if not body.wants_policies:
        return None
    model, prelude = admitted.model, admitted.prelude
    control = prelude.engine.control
    versions = {adapter.name: adapter.version for adapter in control.adapters()}
    base = control.version(model.parent or model.names[0]).label
    return PolicySpans(
        policies=prelude.request.app.state.policies,
        slot=model.adapter or admitted.name,
        label=versions.get(model.adapter or "", base),
        num_prompt_tokens=len(prepared.prompt_ids),
    )


def body_fields(body: ChatRequest) -> dict[str, str]:
    """Return what a body of chat calls the engine's names."""
    fields = {"prompt": "messages", "logprobs": "top_logprobs", "beam_width": "n"}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    return fields
