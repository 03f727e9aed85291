"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, as Anthropic has them."""

from __future__ import annotations

from fastapi import Response

from mlx_parallm.api.anthropic.answer import MessageAnswer
from mlx_parallm.api.anthropic.dialect import ANTHROPIC
from mlx_parallm.api.anthropic.documents import media_sources, read_pdfs
from mlx_parallm.api.anthropic.request import (
    counted_turn,
    message_turn,
    too_long_in_these_words,
    within_context,
)
from mlx_parallm.api.anthropic.schema import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    TokenCount,
)
from mlx_parallm.api.http import sse
from mlx_parallm.api.http.declared import COUNT, INPUT
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.prelude import PreludeDep, generator
from mlx_parallm.api.turns.prepare import prepare_turn, render_turn
from mlx_parallm.api.turns.sources import num_prompt_tokens
from mlx_parallm.api.turns.stream import StreamForm, respond
from mlx_parallm.types.token_limit import ANY_LENGTH

# What these bodies call the engine's names.
FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
EVENTS = StreamForm(sse.events, keep_alive=sse.events({"type": "ping"}))
routes = Routes(CHAT, dialect=ANTHROPIC, body_limit=INPUT, short=True, in_any_process=True)


@routes.post("/v1/messages", batchable=True, response_model=Message, responses=sse.STREAMED)
async def create_message(body: MessagesRequest, prelude: PreludeDep) -> Response:
    """Continue a conversation, in Anthropic's shape."""
    admitted = await prelude.admit(body.model, takes_sources=True)
    most = prelude.config.max_body_bytes
    has_files = await read_pdfs(body.messages, admitted.model, prelude.images, most)
    turn = await (in_thread if has_files else prelude.on_body)(
        lambda: message_turn(body, request_id=f"msg_{prelude.answer_id}", client=prelude.client)
    )
    with named_by(FIELDS), too_long_in_these_words(admitted.model):
        prepared = await prepare_turn(turn, admitted.model, prelude.images)
    prepared, is_shortened = within_context(prepared)
    generation = await admitted.start([prepared.request], FIELDS)
    answer = MessageAnswer(body, prepared, model=admitted.name, is_shortened=is_shortened)
    return await respond(prelude, generation, answer, stream=body.stream, form=EVENTS)


@routes.post("/v1/messages/count_tokens", body_limit=COUNT)
async def count_tokens(body: CountTokensRequest, prelude: PreludeDep) -> TokenCount:
    """Count the tokens of a conversation; nothing is generated."""
    _, model = generator(prelude.engine, body.model, takes_sources=True)
    await prelude.check_texts(media_sources(body.messages))
    most = prelude.config.max_tokenize_bytes
    has_files = await read_pdfs(body.messages, model, prelude.images, most)
    turn = await (in_thread if has_files else prelude.on_body)(
        lambda: counted_turn(body, request_id="", client=prelude.client)
    )
    prompt = await render_turn(turn, model, limit=ANY_LENGTH, images=prelude.images)
    return TokenCount(input_tokens=num_prompt_tokens(prompt))
