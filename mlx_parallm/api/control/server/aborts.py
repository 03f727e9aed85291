"""``POST /abort_requests`` (vLLM) and ``/abort_request`` (SGLang): end requests from outside."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Depends, Request

from mlx_parallm.api.control.server.schema import AbortRequest, AbortRequests, AbortResponse
from mlx_parallm.api.http.auth import client_of, may_reach_others, refuse_other_origins
from mlx_parallm.api.http.dependencies import ConfigDep, EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.config import ServerConfig
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import AuthenticationError, InvalidRequestError
from mlx_parallm.types.request import GenerateRequest

routes = Routes(SERVER, dependencies=[Depends(refuse_other_origins)])


@routes.post("/abort_requests")
@routes.post("/inference/v1/abort_requests", include_in_schema=False)
async def abort_requests(
    body: AbortRequests, request: Request, engine: EngineDep, config: ConfigDep
) -> AbortResponse:
    """End the caller's requests of these ids; with an admin key, anybody's."""
    wanted = frozenset(body.request_ids)
    return await _abort(request, engine, config, lambda one: is_named(one, wanted))


@routes.post("/abort_request")
async def abort_request(
    body: AbortRequest, request: Request, engine: EngineDep, config: ConfigDep
) -> AbortResponse:
    """End one of the caller's requests, or all of them; with an admin key, anybody's."""
    if body.abort_all:
        return await _abort(request, engine, config, lambda _: True)
    if not body.rid:
        raise InvalidRequestError("rid or abort_all is needed.", param="rid")
    wanted = frozenset({body.rid})
    return await _abort(request, engine, config, lambda one: is_named(one, wanted))


async def _abort(
    request: Request,
    engine: EngineClient,
    config: ServerConfig,
    is_meant: Callable[[GenerateRequest], bool],
) -> AbortResponse:
    engine.check_health()
    reaches_all = may_reach_others(request)
    if config.admin_api_keys and not config.api_keys and not reaches_all:
        # Without API keys nothing tells whose a request is.
        raise AuthenticationError("This route needs the admin key.")
    client = client_of(request.headers, config)
    chosen = [
        one
        for one in engine.open_requests()
        if is_meant(one) and (reaches_all or one.client == client)
    ]
    for one in chosen:
        await engine.cancel(one.request_id)
    return AbortResponse(aborted=sorted({one.group or one.request_id for one in chosen}))


def is_named(request: GenerateRequest, wanted: frozenset[str]) -> bool:
    """Whether one of the ids is the request's: as answered, or without its prefix, as sent."""
    name = request.group or request.request_id
    return bool(wanted & {request.request_id, name, name.partition("-")[2]} - {""})
