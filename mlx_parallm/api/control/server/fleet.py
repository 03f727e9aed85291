"""Routes for routers and launchers of rollout servers: load, size, and a probe of generation."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import Request, Response
from pydantic import BaseModel, Field, StrictStr

from mlx_parallm import __version__
from mlx_parallm.api.control.weights.schema import MAX_PATH_CHARS
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep, OpenEngineDep
from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.engine.status import EngineReport, Readiness
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams

routes = Routes(SERVER)

DEFAULT_PORTS = {"http": 80, "https": 443}


class Load(BaseModel):
    """Load of one engine, in SGLang's names."""

    dp_rank: int = Field(description="The engine's number, from 0.")
    state: Readiness = Field(
        description="ready; catching_up: loaded, and applying earlier changes of weights and "
        "adapters; starting: dead or loading, and its other values are 0; silent: its process "
        "does not answer, and is killed if that goes on."
    )
    num_running_reqs: int = Field(description="Sequences in the batch.")
    num_waiting_reqs: int = Field(description="Sequences that wait for a place in it.")
    num_total_reqs: int = Field(description="Both.")
    num_waiting_tokens: int = Field(description="Tokens of the prompts that wait.")
    num_used_tokens: int = Field(description="Tokens that the KV blocks in use have room for.")
    max_total_num_tokens: int = Field(description="Tokens that its KV pools hold.")
    token_usage: float = Field(description="Used tokens over all tokens, 0 to 1.")
    max_running_requests: int = Field(description="Sequences of a model running at once, at most.")


class Loads(BaseModel):
    """SGLang's answer of ``/v1/loads``."""

    timestamp: str = Field(description="ISO 8601.")
    version: str = Field(description="Of this server.")
    loads: list[Load] = Field(description="One entry for each engine.")
    aggregate: dict[str, Any] = Field(description="The same summed up.")


class RankLoad(BaseModel):
    """Load of one engine, as SGLang's router reads it."""

    dp_rank: int = Field(description="The engine's number, from 0.")
    num_reqs: int = Field(description="Sequences that run or wait.")
    num_waiting_reqs: int = Field(description="Sequences that wait for a place in the batch.")
    num_tokens: int = Field(
        description="Tokens that the KV blocks in use have room for, and of the prompts that wait."
    )


class WorldSize(BaseModel):
    """Number of devices that compute."""

    world_size: int = Field(description="Devices: the ranks of each engine.")


class Worker(BaseModel):
    """This server, as a router lists it."""

    id: str = Field(description="Its address.")
    url: str = Field(description="Its address.")
    model_id: str = Field(description="The first model.")
    worker_type: str = Field(default="regular", description="Always regular.")
    is_healthy: bool = Field(default=True, description="Always true.")


class NewWorker(OpenForm):
    """The body that adds a server to a router."""

    url: Annotated[StrictStr, Field(min_length=1, max_length=MAX_PATH_CHARS)] = Field(
        description="This server's own address."
    )
    worker_type: Literal["regular"] = Field(
        "regular", description="Prefill and decode are not separated here."
    )


class AddedWorker(BaseModel):
    """The worker that was added."""

    status: str = Field(default="accepted", description="Always accepted.")
    worker_id: str = Field(description="The id in /workers.")
    url: str = Field(description="Its address.")


class Workers(BaseModel):
    """The list of a router with one worker: this server itself."""

    workers: list[Worker] = Field(description="One entry.")
    total: int = Field(default=1, description="Always 1.")


@routes.get("/health_generate", response_class=Response)
async def health_generate(request: Request, engine: OpenEngineDep) -> Response:
    """Answer 200 if a token can be generated (SGLang); a busy or paused server is not tried."""
    if not engine.control.is_paused and not (await engine.load()).num_running:
        await _make_token(engine, f"health-{request.state.answer_id}")
    return Response(status_code=200)


@routes.get("/v1/loads")
async def loads(engine: EngineDep, dp_rank: int | None = None) -> Loads:
    """Report how busy each engine is (SGLang); ``dp_rank`` chooses one of them."""
    reports = await engine.engines()
    if dp_rank is not None:
        reports = [report for report in reports if report.rank == dp_rank]
        if not reports:
            raise InvalidRequestError(f"No engine has the number {dp_rank}.", param="dp_rank")
    entries = [_load(report, engine.config.scheduler.max_num_seqs) for report in reports]
    return Loads(
        timestamp=datetime.now(UTC).isoformat(),
        version=__version__,
        loads=entries,
        aggregate={
            "total_running_reqs": sum(entry.num_running_reqs for entry in entries),
            "total_waiting_reqs": sum(entry.num_waiting_reqs for entry in entries),
            "total_reqs": sum(entry.num_total_reqs for entry in entries),
        },
    )


@routes.get("/get_load")
async def get_load(engine: EngineDep) -> list[RankLoad]:
    """Report the load of each engine to SGLang's router, which adds up ``num_tokens``."""
    entries = [_load(each, engine.config.scheduler.max_num_seqs) for each in await engine.engines()]
    return [
        RankLoad(
            dp_rank=entry.dp_rank,
            num_reqs=entry.num_total_reqs,
            num_waiting_reqs=entry.num_waiting_reqs,
            num_tokens=entry.num_used_tokens + entry.num_waiting_tokens,
        )
        for entry in entries
    ]


def _load(report: EngineReport, max_num_seqs: int) -> Load:
    load = report.load
    # Requests that were admitted after the latest step are waiting.
    waiting = max(load.num_waiting, load.num_requests - load.num_running)
    return Load(
        dp_rank=report.rank,
        state=report.readiness,
        num_running_reqs=load.num_running,
        num_waiting_reqs=waiting,
        num_total_reqs=load.num_running + waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_used_tokens=load.num_used_tokens,
        max_total_num_tokens=load.num_kv_tokens,
        token_usage=round(load.num_used_tokens / max(1, load.num_kv_tokens), 4),
        max_running_requests=max_num_seqs if report.is_ready else 0,
    )


@routes.get("/get_world_size")
async def world_size(engine: EngineDep, include_dp: bool = True) -> WorldSize:
    """Return the number of devices (vLLM): of one engine's ranks, or with ``include_dp`` of all."""
    num_engines = len(engine.readiness()) if include_dp else 1
    return WorldSize(world_size=engine.config.ranks.size * num_engines)


@routes.get("/workers")
async def workers(request: Request, engine: EngineDep) -> Workers:
    """List the workers of a router, for slime: only this server."""
    url = str(request.base_url).rstrip("/")
    name = GENERATION.client(engine).first_model().names[0]
    return Workers(workers=[Worker(id=url, url=url, model_id=name)])


@routes.post("/workers", access=Access.ADMIN)
async def add_worker(body: NewWorker, request: Request) -> AddedWorker:
    """Accept this server's own address as a worker, for slime, which announces each engine."""
    url = str(request.base_url).rstrip("/")
    if _address(body.url) not in (_address(url), request.scope.get("server")):
        raise InvalidRequestError(
            f"This server can only be its own worker, {url}. To use several servers, put a router "
            "in front of them.",
            param="url",
        )
    return AddedWorker(worker_id=url, url=url)


def _address(url: str) -> tuple[str | None, int | None]:
    """Return host and port of an HTTP address; None for any other text."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None, None
    return parts.hostname, port or DEFAULT_PORTS.get(parts.scheme)


async def _make_token(engine: EngineClient, request_id: str) -> None:
    model = GENERATION.client(engine).first_model().names[0]
    params = SamplingParams(temperature=0, max_tokens=1)
    probe = GenerateRequest(request_id=request_id, model=model, prompt_ids=(0,), params=params)
    handle = await GENERATION.client(engine).submit(probe)
    async for event in handle.events:
        if isinstance(event, ErrorEvent):
            raise event.error
