"""The application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from mlx_parallm import __version__
from mlx_parallm.api.audio.recordings import Recordings
from mlx_parallm.api.control.art.policies import ArtPolicies
from mlx_parallm.api.control.server.load_log import LoadLog
from mlx_parallm.api.files.service import make_batch_service
from mlx_parallm.api.http import openapi
from mlx_parallm.api.http.auth import ANY, KeyRing, checked_hosts
from mlx_parallm.api.http.body_budget import BodyBudgetMiddleware
from mlx_parallm.api.http.errors import install_error_handlers
from mlx_parallm.api.http.json_body import HEADER
from mlx_parallm.api.http.middleware import (
    AccessLogMiddleware,
    DirectMiddleware,
    HeadMiddleware,
    RefusingMiddleware,
    RequestIdMiddleware,
    RouteMiddleware,
    refuse_hosts,
    refuse_keys,
    refuse_origins,
)
from mlx_parallm.api.http.openapi import Example, add_examples, read_examples
from mlx_parallm.api.http.request_counts import CountingMiddleware, RequestCounts
from mlx_parallm.api.http.routing import DeclaredRoute, RouteIndex, declared_routes
from mlx_parallm.api.mezo.rewards import RolloutRewards
from mlx_parallm.api.replicas.answers import PeersMiddleware
from mlx_parallm.api.responses.saved import SavedResponses
from mlx_parallm.api.responses.service import ResponseService
from mlx_parallm.api.responses.socket import ResponseSockets
from mlx_parallm.api.responses.store import ResponseStore
from mlx_parallm.api.turns.images import Images
from mlx_parallm.batch_jobs.service import BatchService
from mlx_parallm.conversations.records import KeepsChats
from mlx_parallm.conversations.service import ConversationService
from mlx_parallm.server_config import ON_DISK, ServerConfig
from mlx_parallm.serving.interface import EngineClient, RequestClient
from mlx_parallm.training.jobs.service import JobService
from mlx_parallm.training.service import TrainingService
from mlx_parallm.training.session_store import SessionLimits

if TYPE_CHECKING:
    from mlx_parallm.replicas.service import Replicas

#: Modules with ``routes``. The order within a group is that of the OpenAPI document.
SLICES = (
    "chat.routes",
    "chat.batch",
    "completions.routes",
    "audio.routes",
    "responses.routes",
    "anthropic.routes",
    "ollama.routes",
    "decisions.routes",
    "pooling.vectors.embeddings",
    "pooling.vectors.moderations",
    "pooling.scores.routes",
    "pooling.vectors.routes",
    "pooling.scores.rewards",
    "pooling.mlm.routes",
    "tokenize.render",
    "rl.capabilities",
    "rl.logprobs",
    "rl.routes",
    "nets.routes",
    "nets.oip.routes",
    "control.server.models",
    "control.weights.adapters",
    "tokenize.routes",
    "pooling.tei.routes",
    "pooling.cohere.routes",
    "ollama.embeddings",
    "ollama.listing",
    "control.server.health",
    "control.server.routes",
    "control.server.aborts",
    "control.art.routes",
    "control.pause.routes",
    "sglang.routes",
    "control.pause.sleep",
    "control.weights.routes",
    "control.server.fleet",
    "mezo.routes",
    "fine_tuning.routes",
    "vllm.routes",
    "page.docs",
    "pooling.hf.routes",
    "page.routes",
)
#: Those of applications with a data folder.
STORING_SLICES = (
    "files.routes",
    "files.uploads",
    "files.batches",
    "anthropic.batches",
    "conversations.routes",
    "chat.stored",
)
#: Those of applications with ``--kv-serve``.
KV_SLICES = ("kv.routes",)
#: Those of servers that change together.
REPLICA_SLICES = ("replicas.routes",)


class Application(FastAPI):
    """FastAPI with this server's groups and keys in its OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        """See FastAPI: made when it is first asked for."""
        if self.openapi_schema is None:
            access = {
                (method, route.path_format): route.facts.access
                for route in declared_routes(self)
                for method in route.methods
            }
            document = super().openapi()
            openapi.complete(document, self.state.config, access)
            add_examples(document, examples_of(SLICES + STORING_SLICES))
        return super().openapi()


def create_app(
    engine: EngineClient,
    config: ServerConfig,
    *,
    max_waiting: int | None = None,
    bound_to: str | None = None,
) -> FastAPI:
    """Return an application that serves an engine which is running already.

    Args:
        engine: what it serves.
        config: how.
        max_waiting: the size of the engine's queue: requests that can never fit are refused.
        bound_to: the IP address of the TCP socket it is served on; None if there is none.
    """
    app = Application(
        title="mlx_parallm",
        version=__version__,
        lifespan=_lifespan,
        openapi_url=None,
        routes=[*routes_of(SLICES)],
    )
    app.state.engine = engine
    app.state.config = config
    app.state.max_waiting = max_waiting
    app.state.images = Images(config.media, separates_clients=config.separates_keys)
    app.state.recordings = Recordings(config.max_audio_seconds)
    app.state.response_sockets = ResponseSockets(config.max_stored_bytes)
    app.state.policies = ArtPolicies()
    conversations = app.state.conversations = _conversations(config)
    app.state.keep_chat = conversations and conversations.keep
    app.state.responses = _responses(config, conversations)
    app.state.batches = make_batch_service(app, engine.config.scheduler, config, max_waiting)
    app.state.training = _training(app, engine, config)
    app.state.jobs = _jobs(app, engine, config)
    app.state.load_log = LoadLog(engine)
    app.state.is_leaving = False
    app.state.counts = RequestCounts()
    if app.state.batches is not None:
        app.router.routes += routes_of(STORING_SLICES)
    app.state.replicas = _replicas(app, engine, config)
    if engine.config.kv_peers.is_served:
        app.router.routes += routes_of(KV_SLICES)
    install_error_handlers(app)
    _add_middleware(app, config, checked_hosts(config, bound_to))
    return app


def _replicas(app: FastAPI, engine: EngineClient, config: ServerConfig) -> Replicas | None:
    """Return the part of an application in its fleet; None if it is of none."""
    if not config.peers:
        return None
    # Servers without peers do not import an HTTP client.
    from mlx_parallm.replicas.peers import parse_peer, parse_peers  # noqa: PLC0415
    from mlx_parallm.replicas.service import Replicas  # noqa: PLC0415

    keys = [key for key in (config.peer_key, *config.admin_api_keys, *config.api_keys) if key]
    app.router.routes += routes_of(REPLICA_SLICES)
    return Replicas(
        engine.control,
        engine.directory,
        parse_peers(config.peers),
        me=None if config.peer_url is None else parse_peer(config.peer_url, "--peer-url"),
        key=keys[0] if keys else None,
        max_bytes=max(config.max_adapter_bytes, config.max_weights_bytes),
        models=engine.config.models,
    )


def _conversations(config: ServerConfig) -> ConversationService | None:
    """Return the conversations of an application; None if it has no data folder."""
    if config.data_dir is None:
        return None
    return ConversationService(
        Path(config.data_dir) / "conversations",
        config.max_conversations_bytes,
        separates_owners=config.separates_keys,
    )


def _responses(config: ServerConfig, conversations: ConversationService | None) -> ResponseService:
    """Return the responses of an application."""
    store = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
    if conversations is None or config.store_responses != ON_DISK:
        return ResponseService(store)
    return ResponseService(store, SavedResponses(store, conversations))


def _training(app: ASGIApp, engine: EngineClient, config: ServerConfig) -> TrainingService | None:
    """Return the training sessions of an application; None if it can have none."""
    if config.data_dir is None or engine.config.ranks.size > 1:
        return None
    limits = SessionLimits(
        max_sessions=config.max_training_sessions,
        max_session_bytes=config.max_training_session_bytes,
        max_bytes=config.max_training_bytes,
        cache_bytes=config.training_cache_bytes,
    )
    training = TrainingService(
        Path(config.data_dir) / "mezo", engine.train, limits, engine.control, RolloutRewards(app)
    )
    engine.control.watchers.append(training)
    return training


def _jobs(app: FastAPI, engine: EngineClient, config: ServerConfig) -> JobService | None:
    """Return the fine-tuning jobs of an application; None if it can have no sessions."""
    training: TrainingService | None = app.state.training
    batches: BatchService | None = app.state.batches
    if training is None or batches is None or config.data_dir is None:
        return None

    async def write_result(owner: str, filename: str, content: bytes) -> str:
        files = await batches.files()
        purpose = "fine-tune-results"
        record = await files.put(content, owner=owner, filename=filename, purpose=purpose)
        return record.id

    return JobService(Path(config.data_dir) / "fine_tuning", training, engine.control, write_result)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    service: BatchService | None = app.state.batches
    training: TrainingService | None = app.state.training
    jobs: JobService | None = app.state.jobs
    if service is not None:
        service.start()
    if training is not None:
        training.start()
    if jobs is not None:
        jobs.start()
    app.state.load_log.start()
    await app.state.responses.restore()
    replicas: Replicas | None = app.state.replicas
    if replicas is not None:
        replicas.start()
    models = asyncio.ensure_future(app.state.engine.directory.watch())
    try:
        yield
    finally:
        models.cancel()
        if replicas is not None:
            await replicas.stop()
        await app.state.load_log.stop()
        if service is not None:
            await service.stop()
        if jobs is not None:
            await jobs.stop()
        if training is not None:
            await training.stop()
        await app.state.responses.stop()
        conversations: ConversationService | None = app.state.conversations
        if conversations is not None:
            await conversations.stop()


def create_request_app(
    engine: RequestClient,
    config: ServerConfig,
    *,
    max_waiting: int,
    bound_to: str,
    policies: ArtPolicies,
    keep_chat: KeepsChats | None = None,
) -> FastAPI:
    """Return an application with the routes that only send requests, for an HTTP process.

    Args:
        engine: see ``create_app``, as for the arguments that are not named here.
        config: how.
        max_waiting: the size of the engine's queue.
        bound_to: the IP address.
        policies: those of the server's first process.
        keep_chat: stores a chat in the server's first process; None: none are stored.
    """
    routes = [route for route in routes_of(SLICES) if route.facts.in_any_process]
    app = Application(openapi_url=None, routes=[*routes])
    app.state.engine = engine
    app.state.config = config
    app.state.max_waiting = max_waiting
    app.state.images = Images(config.media, separates_clients=config.separates_keys)
    app.state.recordings = Recordings(config.max_audio_seconds)
    app.state.policies = policies
    app.state.keep_chat = keep_chat
    app.state.counts = RequestCounts()
    install_error_handlers(app)
    _add_middleware(app, config, checked_hosts(config, bound_to))
    return app


def answers_in_any_process() -> Callable[[str, str], bool]:
    """Return a predicate of a method and a path: whether every HTTP process answers them.

    All routes count: a path of the first process may fit the pattern of a route that is not.
    """
    index = RouteIndex.of(routes_of(SLICES + STORING_SLICES))

    def answers(method: str, path: str) -> bool:
        route = index.route(method, path)
        return route is not None and route.facts.in_any_process

    return answers


def routes_of(slices: Iterable[str]) -> list[DeclaredRoute]:
    """Return the routes of modules in this package, by their names."""
    modules = (import_module(f"mlx_parallm.api.{name}") for name in slices)
    return [route for module in modules for route in module.routes.all]


def examples_of(slices: Iterable[str]) -> dict[str, Example]:
    """Return the examples of these modules' operations by "METHOD path"."""
    package = files("mlx_parallm.api")
    folders = dict.fromkeys(name.rpartition(".")[0].replace(".", "/") for name in slices)
    return read_examples(package / folder for folder in folders)


def _add_middleware(app: FastAPI, config: ServerConfig, hosts: frozenset[str] | None) -> None:
    # The last added runs first.
    app.add_middleware(DirectMiddleware)
    if config.peers:
        app.add_middleware(PeersMiddleware)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(BodyBudgetMiddleware, config=config)
    keys = KeyRing((*config.api_keys, *config.admin_api_keys) if config.api_keys else ())
    app.add_middleware(RefusingMiddleware, refusal=partial(refuse_keys, keys))
    app.add_middleware(RefusingMiddleware, refusal=partial(refuse_origins, config))
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=list(config.allowed_methods),
            allow_headers=list(config.allowed_headers),
            allow_credentials=config.allow_credentials,
            # Only pages that are named may reach a server of a private network.
            allow_private_network=ANY not in config.allowed_origins,
            expose_headers=["x-request-id", "request-id", "retry-after", HEADER],
        )
    if hosts is not None:
        app.add_middleware(RefusingMiddleware, refusal=partial(refuse_hosts, hosts))
    if config.access_log:
        app.add_middleware(AccessLogMiddleware)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(CountingMiddleware, counts=app.state.counts)
    app.add_middleware(RouteMiddleware, routes=declared_routes(app))
