"""Hugging Face's task form: ``POST /``, ``/models/{name}`` and ``/pipeline/{task}/{name}``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.hf.choice import TASKS, choose
from mlx_parallm.api.pooling.hf.job import Job
from mlx_parallm.api.pooling.hf.schema import TaskRequest
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.serving.interface import EngineClient

routes = Routes(POOLING, body_limit=INPUT)

WARNINGS = "x-warnings"
MAX_WARNING_CHARS = 1000


@routes.post("/")
async def run_task(body: TaskRequest, request: Request, engine: EngineDep) -> Response:
    """A task of the first model that can do it."""
    return await _run(body, request, engine, None, None)


@routes.post("/models/{name:path}")
async def run_task_of_model(
    name: str, body: TaskRequest, request: Request, engine: EngineDep
) -> Response:
    """A task of this model; its name may end with ``/pipeline/{task}``."""
    before, marker, task = name.rpartition("/pipeline/")
    if marker and task in TASKS:
        return await _run(body, request, engine, before, task)
    return await _run(body, request, engine, name, None)


@routes.post("/pipeline/{task}")
async def run_named_task(
    task: str, body: TaskRequest, request: Request, engine: EngineDep
) -> Response:
    """This task, by the first model that can do it."""
    return await _run(body, request, engine, None, task)


@routes.post("/pipeline/{task}/{name:path}")
async def run_named_task_of_model(
    task: str, name: str, body: TaskRequest, request: Request, engine: EngineDep
) -> Response:
    """This task of this model."""
    return await _run(body, request, engine, name, task)


async def _run(
    body: TaskRequest, request: Request, engine: EngineClient, name: str | None, task: str | None
) -> Response:
    parameters = body.all_parameters()
    model, run = choose(engine.encoders, body.inputs, parameters, name=name, task=task)
    job = Job(
        inputs=body.inputs,
        parameters=parameters,
        model=model,
        engine=engine,
        request_id=f"task-{request.state.answer_id}",
    )

    async def respond() -> Response:
        done = await run(job)
        # Thousands of vectors take long to write.
        response = await asyncio.to_thread(JSONResponse, done.answer)
        if done.warnings:
            response.headers[WARNINGS] = _plain(done.warnings)
        return response

    return await unless_disconnected(request, respond())


def _plain(warnings: Iterable[str]) -> str:
    """As a header can hold it."""
    text = " ".join(warnings).encode("ascii", "backslashreplace").decode()
    return "".join(char for char in text if char.isprintable())[:MAX_WARNING_CHARS]
