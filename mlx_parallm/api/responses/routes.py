"""``/v1/responses``: answers made of items, kept for later, perhaps made in the background."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.files.schema import list_object, page_of
from mlx_parallm.api.http.auth import INTERNAL_CALLER
from mlx_parallm.api.http.body_budget import held_body
from mlx_parallm.api.http.declared import COUNT, INPUT
from mlx_parallm.api.http.dependencies import ClientDep
from mlx_parallm.api.http.offload import on_body
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED, EventStreamResponse
from mlx_parallm.api.http.websocket import SocketResponse, check_handshake
from mlx_parallm.api.responses.answer import ResponseAnswer
from mlx_parallm.api.responses.compaction import CompactionAnswer, prepare_summary, summary_turn
from mlx_parallm.api.responses.conversation import begin_turn, end_turn, read_history
from mlx_parallm.api.responses.include import IncludeDep, shown, with_reasoning
from mlx_parallm.api.responses.items import TRIGGER, placed_images
from mlx_parallm.api.responses.request import FIELDS, input_turn, response_turn
from mlx_parallm.api.responses.schema import (
    CompactRequest,
    InputTokensRequest,
    ResponsesInput,
    ResponsesRequest,
)
from mlx_parallm.api.responses.service import ResponseService
from mlx_parallm.api.responses.socket import EVENTS, MEMORY, ResponseSockets
from mlx_parallm.api.responses.store import ConnectionMemory, StoredResponse
from mlx_parallm.api.responses.tools import ResponseTool, response_tools
from mlx_parallm.api.turns.generation import Generation, named_by
from mlx_parallm.api.turns.prelude import Admitted, Prelude, PreludeDep, generator
from mlx_parallm.api.turns.prepare import PreparedTurn, prepare_turn, render_turn
from mlx_parallm.api.turns.sources import num_prompt_tokens
from mlx_parallm.api.turns.stream import NAMED_EVENTS, StreamForm, respond
from mlx_parallm.api.turns.truncation import prepare_fitting
from mlx_parallm.conversations.store import check_ids
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.token_limit import ANY_LENGTH

routes = Routes(CHAT, body_limit=INPUT, short=True)


async def get_responses(request: Request) -> ResponseService:
    """Return the responses of this application."""
    return request.app.state.responses


ResponsesDep = Annotated[ResponseService, Depends(get_responses)]


@routes.post("/v1/responses", batchable=True, responses=STREAMED)
async def create_response(
    body: ResponsesRequest, prelude: PreludeDep, responses: ResponsesDep
) -> Response:
    """Answer an input: whole, as a stream of events, or in the background."""
    body.check_supported()
    if MEMORY in prelude.request.scope:
        body.check_message()
    if body.background and INTERNAL_CALLER in prelude.request.scope:
        raise InvalidRequestError("A batch is in the background already.", param="background")
    with ExitStack() as stack:
        return await _create(body, prelude, responses, stack)


async def _create(
    body: ResponsesRequest,
    prelude: Prelude,
    responses: ResponseService,
    stack: ExitStack,
) -> Response:
    """Answer a body; what ``stack`` has is done once the generation has ended."""
    memory: ConnectionMemory | None = prelude.request.scope.get(MEMORY)
    admitted = await prelude.admit(body.model, takes_sources=True)
    turn = await begin_turn(body, prelude, stack)
    history = await read_history(body, prelude)
    raw_items = await prelude.on_body(lambda: responses.items(body, prelude.client))
    items = [item for item in raw_items if item["type"] != TRIGGER]
    is_summary = len(items) < len(raw_items)
    if turn is not None:
        check_ids(items, history.items)
    entry = responses.entry(
        body,
        items,
        response_id=f"resp_{uuid.uuid4().hex}",
        client=prelude.client,
        num_bytes=len(await prelude.request.body()),
        history=history,
        memory=memory,
    )
    tools = response_tools(body.tools)
    if is_summary:
        prepared = await _prepare_summary(body, entry, admitted)
    else:
        prepared = await _prepare(body, tools, entry, admitted)

    async def keep(response: dict[str, Any]) -> None:
        with ExitStack() as undo:
            if body.store:
                # What is evicted at once is deleted after it was saved.
                await responses.save(entry, response)
                undo.callback(responses.drop_saved, entry)
            if turn is not None:
                await end_turn(turn, items, response)
            undo.pop_all()
        if not body.background:
            responses.keep(entry, response, is_stored=body.store, memory=memory)

    async def start() -> Generation:
        generation = await admitted.start([prepared.request], FIELDS)
        generation.on_end(stack.pop_all().close)
        return generation

    answer = ResponseAnswer(
        body, prepared, model=admitted.name, tools=tools, keep=keep, is_summary=is_summary
    )
    stream, form = (body.stream, NAMED_EVENTS) if memory is None else (True, EVENTS)
    if not body.generate:
        return await _without_output(answer, form if stream else None)
    if not body.background:
        return await respond(prelude, await start(), answer, stream=stream, form=form)
    job = await responses.make(entry, answer, start, keeps_events=body.stream)
    return _events(job.events(0), prelude) if body.stream else JSONResponse(job.response())


@routes.get("/v1/responses", include_in_schema=False)
async def connect(request: Request, prelude: PreludeDep) -> Response:
    """Go on with a WebSocket, whose messages ask for responses."""
    scope = request.scope
    check_handshake(scope)
    body = held_body(scope)
    sockets: ResponseSockets = request.app.state.response_sockets
    socket = sockets.socket(
        scope,
        prelude.client,
        max_size=body.max_size,
        timeout_s=prelude.config.client_timeout_s,
        held=body.another(),
    )
    return SocketResponse(scope, socket)


@routes.post("/v1/responses/compact")
async def compact_conversation(
    body: CompactRequest, prelude: PreludeDep, responses: ResponsesDep
) -> Response:
    """Sum up a conversation; the output is an input for what follows it. Nothing is stored."""
    body.check_input()
    admitted = await prelude.admit(body.model)
    items = await prelude.on_body(lambda: responses.items(body, prelude.client))
    response_id = f"resp_{uuid.uuid4().hex}"
    num_bytes = len(await prelude.request.body())
    entry = responses.entry(
        body,
        items,
        response_id=response_id,
        client=prelude.client,
        num_bytes=num_bytes,
        history=await read_history(body, prelude),
    )
    prepared = await _prepare_summary(body, entry, admitted)
    generation = await admitted.start([prepared.request], FIELDS)
    answer = CompactionAnswer(prepared, entry.items)
    return await respond(prelude, generation, answer, stream=False)


@routes.post("/v1/responses/input_tokens", body_limit=COUNT)
async def count_input_tokens(
    body: InputTokensRequest, prelude: PreludeDep, responses: ResponsesDep
) -> dict[str, Any]:
    """Count the tokens of an input; nothing is generated."""
    body.check_input()
    client = prelude.client
    _, model = generator(prelude.engine, body.model, takes_sources=True)
    items = await prelude.on_body(lambda: responses.items(body, client))
    num_bytes = len(await prelude.request.body())
    history = await read_history(body, prelude)
    entry = responses.entry(
        body, items, response_id="", client=client, num_bytes=num_bytes, history=history
    )
    with named_by(FIELDS):
        turn = await on_body(
            entry.num_bytes,
            lambda: input_turn(body, entry.items, response_tools(body.tools), request_id=""),
        )
        await prelude.check_texts(url for url, _ in placed_images(body.input))
        prompt = await render_turn(turn, model, limit=ANY_LENGTH, images=prelude.images)
    return {"object": "response.input_tokens", "input_tokens": num_prompt_tokens(prompt)}


@routes.get("/v1/responses/{response_id}", responses=STREAMED)
async def retrieve_response(
    response_id: str,
    prelude: PreludeDep,
    responses: ResponsesDep,
    include: IncludeDep,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Return a response as it is now, or the events of one in the background.

    It has what its own request included; log-probabilities that this did not are not kept.
    """
    if stream:
        return _events(responses.events(response_id, prelude.client, starting_after + 1), prelude)
    response = responses.get(response_id, prelude.client).response()
    output = [with_reasoning(item, include) for item in response["output"]]
    return JSONResponse(response | {"output": output})


@routes.delete("/v1/responses/{response_id}")
async def delete_response(
    response_id: str, client: ClientDep, responses: ResponsesDep
) -> dict[str, Any]:
    """Forget a response; one that is being made ends."""
    await responses.delete(response_id, client)
    return {"id": response_id, "object": "response", "deleted": True}


@routes.post("/v1/responses/{response_id}/cancel")
async def cancel_response(
    response_id: str, client: ClientDep, responses: ResponsesDep
) -> dict[str, Any]:
    """End a response that is made in the background."""
    return await responses.cancel(response_id, client)


@routes.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    client: ClientDep,
    responses: ResponsesDep,
    include: IncludeDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List the items that a response answers, those of earlier responses included.

    ``after`` is the last id of the page before.
    """
    page, has_more = page_of(
        responses.get(response_id, client).items,
        after=after,
        limit=limit,
        descending=order == "desc",
        kind="item",
    )
    return list_object([shown(item, include) for item in page], has_more)


async def _prepare(
    body: ResponsesRequest,
    tools: Sequence[ResponseTool],
    entry: StoredResponse,
    admitted: Admitted,
) -> PreparedTurn:
    with named_by(FIELDS):
        turn = await on_body(
            entry.num_bytes,
            lambda: response_turn(body, entry.items, tools, admitted.prelude, request_id=entry.id),
        )
        prepare = prepare_fitting if body.truncation == "auto" else prepare_turn
        return await prepare(turn, admitted.model, admitted.prelude.images)


async def _prepare_summary(
    body: ResponsesInput, entry: StoredResponse, admitted: Admitted
) -> PreparedTurn:
    with named_by(FIELDS):
        turn = summary_turn(
            body, entry.items, admitted.model, request_id=entry.id, client=entry.client
        )
        return await prepare_summary(body, turn, admitted.model, admitted.prelude.images)


async def _without_output(answer: ResponseAnswer, form: StreamForm | None) -> Response:
    """Answer a request that generates nothing; ``form`` is that of its stream, if it has one."""
    events = answer.without_output()
    await answer.settle()
    if form is None:
        return JSONResponse(answer.response())
    return Response(form.encode(*events), media_type=form.content_type)


def _events(events: AsyncIterator[bytes], prelude: Prelude) -> Response:
    """Return the events of a response in the background, which goes on when the reader leaves."""

    async def leave() -> None:
        pass

    return EventStreamResponse(events, on_close=leave, keep_alive_s=prelude.config.sse_keep_alive_s)
