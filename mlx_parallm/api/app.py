"""The application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from mlx_parallm import __version__
from mlx_parallm.api import openapi
from mlx_parallm.api.batch_service import make_batch_service
from mlx_parallm.api.body_budget import BodyBudgetMiddleware
from mlx_parallm.api.errors import install_error_handlers
from mlx_parallm.api.hosts import checked_hosts
from mlx_parallm.api.ignored import HEADER
from mlx_parallm.api.in_flight.policies import Policies
from mlx_parallm.api.middleware import (
    AccessLogMiddleware,
    AuthMiddleware,
    BodyLimitMiddleware,
    HeadMiddleware,
    HostMiddleware,
    OriginMiddleware,
    RequestIdMiddleware,
    body_limits,
)
from mlx_parallm.api.responses.service import ResponseService
from mlx_parallm.api.responses.store import ResponseStore
from mlx_parallm.api.routes import (
    aborts,
    adapters,
    art,
    batches,
    chat,
    classify,
    completions,
    decisions,
    docs,
    embeddings,
    files,
    fleet,
    health,
    hf_tasks,
    lifecycle,
    memory,
    messages,
    mlm,
    models,
    moderations,
    pooling,
    render,
    rerank,
    responses,
    rewards,
    rl_capabilities,
    rl_logprobs,
    rollout,
    score,
    server_info,
    sglang,
    tei,
    token_generate,
    tokenize,
    weights,
)
from mlx_parallm.api.routes.page import page_files, page_router
from mlx_parallm.api.schemas.errors import ErrorResponse
from mlx_parallm.batch_jobs.service import BatchService
from mlx_parallm.config import ServerConfig
from mlx_parallm.serving.interface import EngineClient

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is at fault."},
    "5XX": {"model": ErrorResponse, "description": "The server is at fault."},
}


class Application(FastAPI):
    """FastAPI with this server's groups and keys in its OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        """See FastAPI: made when it is first asked for."""
        if self.openapi_schema is None:
            openapi.complete(super().openapi(), self.state.config)
        return super().openapi()


def create_app(
    engine: EngineClient,
    config: ServerConfig,
    *,
    max_waiting: int | None = None,
    bound_to: str | None = None,
    routes: Sequence[BaseRoute] | None = None,
) -> FastAPI:
    """An application that serves an engine which is running already.

    Args:
        engine: what it serves.
        config: how.
        max_waiting: the size of the engine's queue: requests that can never fit are refused.
        bound_to: the IP address of the TCP socket it is served on; None if there is none.
        routes: ``common_routes()`` of another application, which need not be made again.
    """
    app = Application(
        title="mlx_parallm",
        version=__version__,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
        routes=list(common_routes() if routes is None else routes),
    )
    app.state.engine = engine
    app.state.config = config
    app.state.max_waiting = max_waiting
    app.state.responses = ResponseService(
        ResponseStore(config.max_stored_responses, config.max_stored_bytes)
    )
    app.state.policies = Policies()
    app.state.batches = make_batch_service(app, engine, config, max_waiting)
    if app.state.batches is not None:
        stored = [(openapi.FILES, files.router), (openapi.FILES, batches.router)]
        _add_with_and_without_prefix(app.router, stored)
    install_error_handlers(app)
    _add_middleware(app, config, checked_hosts(config, bound_to))
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: BatchService | None = app.state.batches
    if service is not None:
        service.start()
    try:
        yield
    finally:
        if service is not None:
            await service.stop()
        await app.state.responses.stop()


def _add_with_and_without_prefix(
    parent: APIRouter, routers: Iterable[tuple[str, APIRouter]]
) -> None:
    """Add routers, each with its group of the OpenAPI document."""
    for group, router in routers:
        parent.include_router(router, prefix="/v1", tags=[group])
        parent.include_router(router, include_in_schema=False)


def common_routes() -> list[BaseRoute]:
    """The routes that every application has; they hold nothing of any."""
    parent = APIRouter(responses=RESPONSES)
    _add_with_and_without_prefix(
        parent,
        [
            # The order within a group is that of the OpenAPI document.
            (openapi.CHAT, chat.router),
            (openapi.CHAT, completions.router),
            (openapi.CHAT, responses.router),
            (openapi.CHAT, messages.router),
            (openapi.CHAT, decisions.router),
            (openapi.POOLING, embeddings.router),
            (openapi.POOLING, rerank.router),
            (openapi.POOLING, score.router),
            (openapi.POOLING, classify.router),
            (openapi.POOLING, pooling.router),
            (openapi.POOLING, rewards.router),
            (openapi.POOLING, moderations.router),
            (openapi.POOLING, mlm.router),
            (openapi.TOKENS, render.router),
            (openapi.RL, rl_capabilities.router),
            (openapi.RL, rl_logprobs.router),
            (openapi.RL, rollout.router),
            (openapi.SERVER, models.router),
            (openapi.SERVER, models.control_router),
            (openapi.SERVER, adapters.router),
        ],
    )
    for group, router in (
        (openapi.TOKENS, tokenize.router),
        (openapi.POOLING, tei.router),
        (openapi.POOLING, rerank.cohere_router),
        (openapi.TOKENS, render.template_router),
        (openapi.SERVER, health.router),
        (openapi.SERVER, server_info.router),
        (openapi.SERVER, aborts.router),
        (openapi.SERVER, adapters.dialect_router),
        (openapi.RL, art.router),
        (openapi.SERVER, lifecycle.router),
        (openapi.CHAT, sglang.router),
        (openapi.SERVER, memory.router),
        (openapi.SERVER, weights.router),
        (openapi.SERVER, fleet.router),
        (openapi.RL, token_generate.router),
        (openapi.SERVER, docs.router),
        (openapi.POOLING, hf_tasks.router),
    ):
        parent.include_router(router, tags=[group])
    parent.include_router(page_router(page_files()))
    parent.mount(docs.ASSETS, docs.assets())
    return parent.routes


def _add_middleware(app: FastAPI, config: ServerConfig, hosts: frozenset[str] | None) -> None:
    # The last added runs first.
    app.add_middleware(HeadMiddleware)
    app.add_middleware(BodyLimitMiddleware, limits=body_limits(config))
    app.add_middleware(BodyBudgetMiddleware, config=config)
    app.add_middleware(AuthMiddleware, config=config)
    app.add_middleware(OriginMiddleware, config=config)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=list(config.allowed_methods),
            allow_headers=list(config.allowed_headers),
            allow_credentials=config.allow_credentials,
            expose_headers=["x-request-id", "request-id", "retry-after", HEADER],
        )
    if hosts is not None:
        app.add_middleware(HostMiddleware, hosts=hosts)
    if config.access_log:
        app.add_middleware(AccessLogMiddleware)
    app.add_middleware(RequestIdMiddleware)
