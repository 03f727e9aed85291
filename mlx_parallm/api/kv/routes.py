"""``/v1/kv/filter`` and ``/v1/kv/blocks``: KV for servers whose ``--kv-peers`` has this one."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from mlx_parallm import __version__
from mlx_parallm.api.http.declared import INPUT, Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.kv.schema import CONTENT, OWNER, BlocksRequest, PrefillRequest
from mlx_parallm.api.replicas.routes import check_release
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.engine.models import EngineState
from mlx_parallm.generation.exported import find_weights, joined, read_blocks, read_filter
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.kv_cache.peer.exports import ANSWER_S, SentBlock
from mlx_parallm.generation.kv_cache.peer.frames import pack_frame, pack_head
from mlx_parallm.replicas.peers import RELEASE_HEADER
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import EngineSilentError, InvalidRequestError, ParallmError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.work import CacheScope

routes = Routes(SERVER, access=Access.ADMIN, dependencies=[Depends(check_release)])

# ASK_S: seconds after which an answer has nothing of the engines that have not answered.
ASK_S = ANSWER_S + 5.0
# OTHERS_S: seconds that further engines have once one has answered with something: who asks does
# not wait for one that loads a model.
OTHERS_S = 1.0
BINARY = "application/octet-stream"
#: ``Ends``: returns True if an answer makes the others needless.
Ends = Callable[[Any], bool]


@routes.get("/v1/kv/filter", response_class=Response, include_in_schema=False, is_polled=True)
async def kv_filter(engine: EngineDep, owner: Annotated[str, Query(pattern=OWNER)]) -> Response:
    """Return a Bloom filter of the KV blocks that this server may have of a model."""
    answers = await _ask_all(engine, partial(read_filter, owner=owner))
    return _answer(joined(answers))


@routes.post("/v1/kv/blocks", response_class=Response, include_in_schema=False, is_polled=True)
async def kv_blocks(body: BlocksRequest, request: Request, engine: EngineDep) -> Response:
    """Return KV blocks of a chain, from its beginning to the first that is not here."""
    return await unless_disconnected(request, _send_blocks(body, engine))


@routes.post(
    "/v1/kv/prefill", include_in_schema=False, body_limit=INPUT, status_code=204, is_polled=True
)
async def kv_prefill(body: PrefillRequest, request: Request) -> Response:
    """Compute the KV of a prompt, which ``/v1/kv/blocks`` returns as it is computed."""
    return await unless_disconnected(request, _compute(body, request.app.state.engine))


async def _compute(body: PrefillRequest, engine: EngineClient) -> Response:
    question = partial(find_weights, owner=body.owner, content=body.weights)
    model, adapter = (await _ask_all(engine, question, lambda _: True))[0]
    request = GenerateRequest(
        request_id=f"prefill-{uuid.uuid4().hex}",
        model=model,
        adapter=adapter,
        prompt_ids=tuple(body.token_ids),
        params=SamplingParams(temperature=0, max_tokens=1),
        cache_salt=body.cache_salt,
        extra_key=body.extra_key,
        # The scope is that of the client which the other server answers.
        scope=CacheScope(body.scope),
        is_local=True,
    )
    handle = await GENERATION.client(engine).submit(request)
    try:
        async for event in handle.events:
            if isinstance(event, ErrorEvent):
                raise event.error
    finally:
        await engine.abort(handle.request_id)
    return Response(status_code=204, headers={RELEASE_HEADER: __version__})


async def _send_blocks(body: BlocksRequest, engine: EngineClient) -> Response:
    contents = [_content(each) for each in body.contents]
    blocks = await _blocks(engine, body.owner, contents, waits=body.waits)
    # Megabytes are hashed and copied, for which streams must not wait.
    return _answer(await asyncio.to_thread(b"".join, _frames(body.owner, contents, blocks)))


async def _blocks(
    engine: EngineClient, owner: str, contents: Sequence[bytes], *, waits: bool
) -> Sequence[Buffer]:
    """Return the longest run that an engine has; the first one of those being computed."""
    question = partial(read_blocks, owner=owner, contents=contents, waits=waits)
    least = 1 if waits else len(contents)
    answers = await _ask_all(engine, question, lambda blocks: len(blocks) >= least)
    longest: Sequence[SentBlock] = max(answers, key=len, default=())
    return [block.data for block in longest]


async def _ask_all(
    engine: EngineClient, question: Callable[[EngineState], Any], is_enough: Ends = lambda _: False
) -> list[Any]:
    """Return the answers of all engines that come in time, up to one that is enough.

    Once one has come that has something, the others have ``OTHERS_S``.

    Raises:
        ParallmError: of an engine, if none answers.
    """
    pending = [asyncio.wrap_future(each) for each in engine.ask_each(question)]
    answers: list[Any] = []
    problems: list[ParallmError] = []
    try:
        async with asyncio.timeout(ASK_S) as limit:
            for done in asyncio.as_completed(pending):
                try:
                    answers.append(await done)
                except ParallmError as problem:
                    problems.append(problem)
                    continue
                if is_enough(answers[-1]):
                    break
                if answers[-1]:
                    soon_s = asyncio.get_running_loop().time() + OTHERS_S
                    limit.reschedule(min(limit.when() or soon_s, soon_s))
    except TimeoutError:
        problems.append(EngineSilentError("No engine has answered in time."))
    finally:
        for each in pending:
            each.cancel()
    if problems and not answers:
        raise problems[0]
    return answers


def _frames(owner: str, contents: Sequence[bytes], blocks: Sequence[Buffer]) -> Iterator[Buffer]:
    yield pack_head(owner)
    for content, block in zip(contents, blocks, strict=False):
        yield pack_frame(content, block)
        yield block


def _content(text: str) -> bytes:
    if not re.fullmatch(CONTENT, text):
        raise InvalidRequestError("contents must be of 64 hexadecimal digits.", param="contents")
    return bytes.fromhex(text)


def _answer(content: bytes) -> Response:
    return Response(content, media_type=BINARY, headers={RELEASE_HEADER: __version__})
