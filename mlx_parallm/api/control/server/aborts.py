"""``POST /abort_requests`` (vLLM) and ``/abort_request`` (SGLang): abort requests by their ids."""

from __future__ import annotations

from collections.abc import Set

from fastapi import Depends, Request

from mlx_parallm.api.control.server.schema import AbortRequest, AbortRequests, AbortResponse
from mlx_parallm.api.http.auth import (
    client_of,
    key_of,
    may_reach_others,
    refuse_other_origins,
    wrong_key,
)
from mlx_parallm.api.http.dependencies import ConfigDep, EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest

routes = Routes(SERVER, dependencies=[Depends(refuse_other_origins)])


@routes.post("/abort_requests")
@routes.post("/inference/v1/abort_requests", include_in_schema=False)
async def abort_requests(
    body: AbortRequests, request: Request, engine: EngineDep, config: ConfigDep
) -> AbortResponse:
    """Abort the caller's requests with these ids; with an admin key, anybody's."""
    return await _abort(request, engine, config, frozenset(body.request_ids))


@routes.post("/abort_request")
async def abort_request(
    body: AbortRequest, request: Request, engine: EngineDep, config: ConfigDep
) -> AbortResponse:
    """Abort one of the caller's requests, or all of them; with an admin key, anybody's."""
    if not body.abort_all and not body.rid:
        raise InvalidRequestError("Give rid or abort_all.", param="rid")
    return await _abort(request, engine, config, None if body.abort_all else {body.rid or ""})


async def _abort(
    request: Request, engine: EngineClient, config: ServerConfig, ids: Set[str] | None
) -> AbortResponse:
    """Abort the requests with these ids, or all requests, of those that the caller may reach."""
    engine.check_health()
    reaches_all = may_reach_others(request)
    if config.admin_api_keys and not config.api_keys and not reaches_all:
        # Without API keys, nothing shows which client sent a request.
        raise wrong_key(key_of(request.headers), name="admin key")
    client = client_of(request.headers, config)
    chosen = [
        each
        for each in engine.open_requests()
        if isinstance(each, GenerateRequest)
        and (ids is None or is_named(each, ids))
        and (reaches_all or each.client == client)
    ]
    for each in chosen:
        await engine.cancel(each.request_id)
    return AbortResponse(aborted=sorted({each.group or each.request_id for each in chosen}))


def is_named(request: GenerateRequest, ids: Set[str]) -> bool:
    """True if one of the ids is the request's, as the answer has it or as the client sent it."""
    name = request.group or request.request_id
    return bool(ids & {request.request_id, name, name.partition("-")[2]} - {""})
