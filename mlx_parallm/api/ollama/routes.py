"""``/api/chat`` and ``/api/generate``, as Ollama has them."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.keep_alive import KeepAliveTime
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.ollama.answer import (
    LINES,
    STREAMED,
    Durations,
    OllamaAnswer,
    empty_answer,
)
from mlx_parallm.api.ollama.dialect import OLLAMA
from mlx_parallm.api.ollama.models import answered_name, served_name
from mlx_parallm.api.ollama.request import (
    CHAT_FIELDS,
    PROMPT_FIELDS,
    chat_turn,
    check_template,
    generate_turn,
    raw_prompt,
)
from mlx_parallm.api.ollama.schema import (
    GenerationFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.logprobs import TokenNames
from mlx_parallm.api.turns.prelude import Admitted, Prelude, PreludeDep, generator
from mlx_parallm.api.turns.prepare import prepare_turn
from mlx_parallm.api.turns.stream import TurnStream, respond
from mlx_parallm.engine.models import name_for
from mlx_parallm.engine.status import ModelState
from mlx_parallm.types.request import GenerateRequest

routes = Routes(CHAT, dialect=OLLAMA, body_limit=INPUT, in_any_process=True)


@routes.post("/api/chat", responses=STREAMED)
async def ollama_chat(body: OllamaChatRequest, prelude: PreludeDep) -> Response:
    """Continue a conversation, in Ollama's shape; without messages, load the model."""
    times = Durations()
    if not body.messages:
        return await _answer_nothing(body, prelude)
    admitted = await _admit(body, prelude)
    with named_by(CHAT_FIELDS):
        turn = await prelude.on_body(lambda: chat_turn(body, prelude))
        prepared = await prepare_turn(turn, admitted.model, prelude.images)
    return await _answer(body, admitted, prepared.request, prepared.stream(), times)


@routes.post("/api/generate", responses=STREAMED)
async def ollama_generate(body: OllamaGenerateRequest, prelude: PreludeDep) -> Response:
    """Answer or continue a prompt, in Ollama's shape; without one, load the model."""
    times = Durations()
    if not (body.prompt or body.suffix or body.images):
        return await _answer_nothing(body, prelude)
    admitted = await _admit(body, prelude)
    check_template(body)
    with named_by(PROMPT_FIELDS):
        if body.raw or body.suffix:
            request, stream = await raw_prompt(body, admitted.model, prelude)
        else:
            turn = await prelude.on_body(lambda: generate_turn(body, prelude))
            prepared = await prepare_turn(turn, admitted.model, prelude.images)
            request, stream = prepared.request, prepared.stream()
    return await _answer(body, admitted, request, stream, times)


async def _admit(body: GenerationFields, prelude: Prelude) -> Admitted:
    name = served_name(prelude.engine, body.model)
    admitted = await prelude.admit(name, takes_sources=True)
    return replace(admitted, name=answered_name(body.model, name, admitted.name))


async def _answer_nothing(body: GenerationFields, prelude: Prelude) -> Response:
    """Bring a model of any kind into memory; with a ``keep_alive`` of 0 let it leave."""
    engine = prelude.engine
    requested = served_name(engine, body.model)
    name = requested or generator(engine, None, takes_sources=True)[0]
    status = engine.find(name)
    if status is None:
        raise engine.not_found(name)
    leaves = body.keep_alive == 0
    stay = KeepAliveTime.of(prelude.request)
    if status.state is ModelState.LOADED or not leaves:
        await engine.wait(name, prelude.client)
        stay.set(engine, name)
    is_chat = isinstance(body, OllamaChatRequest)
    reason = "unload" if leaves else "load"
    name = answered_name(body.model, requested, name_for(status, name))
    return JSONResponse(empty_answer(name, reason, is_chat=is_chat))


async def _answer(
    body: GenerationFields,
    admitted: Admitted,
    request: GenerateRequest,
    stream: TurnStream,
    times: Durations,
) -> Response:
    is_chat = isinstance(body, OllamaChatRequest)
    fields = CHAT_FIELDS if is_chat else PROMPT_FIELDS
    names = TokenNames(admitted.model.tokenizer, as_ids=False)
    answer = OllamaAnswer(stream, names, model=admitted.name, is_chat=is_chat, times=times)
    generation = await admitted.start([request], fields)
    return await respond(admitted.prelude, generation, answer, stream=body.stream, form=LINES)
