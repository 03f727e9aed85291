"""``/v1/training`` and ``/v1/mezo``: training sessions inside the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Query, Request
from starlette.responses import Response

from mlx_parallm.adapters.writing import adapter_archive
from mlx_parallm.api.control.weights.adapters import card
from mlx_parallm.api.control.weights.schema import AdapterCard
from mlx_parallm.api.http import sse
from mlx_parallm.api.http.declared import INPUT, Access
from mlx_parallm.api.http.dependencies import ConfigDep, EngineDep
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED, EventStreamResponse
from mlx_parallm.api.mezo.answer import ask_answer, session_answer, step_answer
from mlx_parallm.api.mezo.answer_schema import (
    Asked,
    CheckpointAnswer,
    DeletedSession,
    EvaluationAnswer,
    SessionAnswer,
    SessionList,
    Steps,
)
from mlx_parallm.api.mezo.request import (
    DATA,
    OBJECTIVES,
    VALIDATION,
    base_of,
    check_caller,
    check_copies,
    check_rank,
    check_size,
    check_template,
    config_maker,
    examples_of,
    model_of,
    rows_of,
    told_losses,
)
from mlx_parallm.api.mezo.rewards import check_reward, prompts_of
from mlx_parallm.api.mezo.rows import AnyRow, Row, rows_as
from mlx_parallm.api.mezo.schema import (
    Caller,
    CreateSession,
    Evaluate,
    MakeSteps,
    Measured,
    Policy,
    Publish,
    Reward,
    RunSteps,
    Tell,
    TrainStep,
)
from mlx_parallm.api.mezo.warm_start import warm_start
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.records import Example, StepRecord
from mlx_parallm.training.service import TrainingService
from mlx_parallm.training.settings import StepChanges
from mlx_parallm.types.errors import ConflictError, InvalidRequestError, NotFoundError

#: ``ALIAS``: sessions were served there when there were no gradients.
ALIAS = ("/v1/training", "/v1/mezo")
routes = Routes(SERVER, access=Access.ADMIN, alias=ALIAS)


async def get_training(request: Request) -> TrainingService:
    """Return the sessions of this application; raise ConflictError if it can keep none."""
    service: TrainingService | None = request.app.state.training
    engine: EngineClient = request.app.state.engine
    if service is None and engine.config.ranks.size > 1:
        raise ConflictError(
            "Training sessions cannot be used under mlx.launch, which starts one process for each "
            "part of one model."
        )
    if service is None:
        raise ConflictError("Training sessions are kept in the data folder: set --data-dir.")
    return service


TrainingDep = Annotated[TrainingService, Depends(get_training)]


@routes.post("/v1/training/sessions", body_limit=INPUT)
async def create_session(
    body: CreateSession,
    request: Request,
    engine: EngineDep,
    config: ConfigDep,
    training: TrainingDep,
) -> SessionAnswer:
    """Begin a session: an adapter that changes nothing yet, an objective and its data."""
    max_rank = engine.config.adapters.max_rank
    if isinstance(body.objective, Caller):
        model = base_of(body.model, engine)
        body, start = await warm_start(body, model, engine.control.adapters(), training.train)
        check_rank(body, max_rank)
        check_caller(body)
        check_copies(body, engine.config.adapters.max_loaded)
        return session_answer(await training.create(config_maker(body, model, start), (), start))
    objective = body.objective
    if isinstance(objective, Reward):
        check_copies(body, engine.config.adapters.max_loaded)
        model = check_reward(body, objective, engine, config)
    else:
        model = model_of(body.model, objective, engine, makes_head=body.makes_head)
    check_template(objective, model)
    if body.data is None and not isinstance(objective, Policy):
        raise InvalidRequestError("data is missing.", param=DATA)
    rows = await rows_of(body.data or (), request)
    adapters = engine.control.adapters()
    body, start = await warm_start(body, model.names[0], adapters, training.train)
    check_size(body, len(rows), max_rank)
    examples = await _read(rows, objective, model)
    judged = await rows_of(body.validation or (), request, VALIDATION)
    validation = await _read(judged, objective, model, VALIDATION) if judged else ()
    has_score = isinstance(model, PoolingModel)
    make = config_maker(body, model.names[0], start, has_score=has_score)
    session = await training.create(make, examples, start, validation)
    return session_answer(session)


@routes.get("/v1/training/sessions")
async def list_sessions(training: TrainingDep) -> SessionList:
    """List all sessions, oldest first."""
    return SessionList(data=[session_answer(session) for session in training.all()])


@routes.get("/v1/training/sessions/{session_id}")
async def retrieve_session(session_id: str, training: TrainingDep) -> SessionAnswer:
    """Return a session."""
    return session_answer(training.get(session_id))


@routes.delete("/v1/training/sessions/{session_id}")
async def delete_session(session_id: str, training: TrainingDep) -> DeletedSession:
    """Delete a session and its log; adapters that it has published stay."""
    await training.delete(session_id)
    return DeletedSession(id=session_id)


@routes.post("/v1/training/sessions/{session_id}/step", body_limit=INPUT)
async def make_steps(
    session_id: str, body: MakeSteps, engine: EngineDep, training: TrainingDep
) -> Steps:
    """Make steps and return their losses and gradients."""
    return await _steps(session_id, body, engine, training)


@routes.post("/v1/training/train_step", body_limit=INPUT)
async def train_step(body: TrainStep, engine: EngineDep, training: TrainingDep) -> Steps:
    """Make steps of the session that the body names, on the batch that it has."""
    if not training.has(body.session_id):
        raise NotFoundError(
            f"There is no training session {body.session_id[:100]!r}.", param="session_id"
        )
    return await _steps(body.session_id, body, engine, training)


@routes.post("/v1/training/sessions/{session_id}/ask")
async def ask_session(session_id: str, training: TrainingDep) -> Asked:
    """Serve the perturbed adapters of the next step, and name them; again, if asked again."""
    return ask_answer(await training.ask(session_id))


@routes.post("/v1/training/sessions/{session_id}/tell", body_limit=INPUT)
async def tell_session(session_id: str, body: Tell, training: TrainingDep) -> Steps:
    """Make the step from the losses of the adapters that ``ask`` named; they are gone then."""
    record = await training.tell(session_id, partial(told_losses, body.losses))
    return Steps(session_id=session_id, data=[step_answer(record)])


@routes.post("/v1/training/sessions/{session_id}/run")
async def run_session(session_id: str, body: RunSteps, training: TrainingDep) -> SessionAnswer:
    """Make steps in the background; ``events`` reports them."""
    return session_answer(training.run(session_id, body.steps))


@routes.get("/v1/training/sessions/{session_id}/events", responses=STREAMED)
async def follow_session(
    session_id: str,
    training: TrainingDep,
    config: ConfigDep,
    after: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Stream the steps after this one, until none is made in the background any more."""
    steps = training.follow(session_id, after)

    async def close() -> None:
        await steps.aclose()

    return EventStreamResponse(_events(steps), on_close=close, keep_alive_s=config.sse_keep_alive_s)


@routes.post("/v1/training/sessions/{session_id}/pause")
async def pause_session(session_id: str, training: TrainingDep) -> SessionAnswer:
    """Make no more steps until the session is resumed."""
    return session_answer(await training.pause(session_id))


@routes.post("/v1/training/sessions/{session_id}/resume")
async def resume_session(session_id: str, training: TrainingDep) -> SessionAnswer:
    """Go on after a pause, whatever its reason."""
    return session_answer(training.resume(session_id))


@routes.post("/v1/training/sessions/{session_id}/evaluate", body_limit=INPUT)
async def evaluate_session(
    session_id: str, body: Evaluate, request: Request, engine: EngineDep, training: TrainingDep
) -> EvaluationAnswer:
    """Return loss, accuracy and macro F1 of the adapter as it is."""
    session = training.get(session_id)
    if session.config.measure in (Measure.REWARD, Measure.POLICY):
        raise InvalidRequestError(
            f"The objective {session.config.measure} has no labels to evaluate; sample with the "
            "published adapter.",
            param=DATA,
        )
    rows = await rows_of(body.data, request)
    examples = await _examples(session_id, rows, engine, training)
    scores = await session.evaluate(examples)
    return EvaluationAnswer(
        session_id=session_id,
        step=session.num_steps,
        num_examples=len(examples),
        loss=scores.loss,
        accuracy=scores.accuracy,
        f1=scores.f1,
    )


@routes.post("/v1/training/sessions/{session_id}/checkpoint")
async def checkpoint_session(session_id: str, training: TrainingDep) -> CheckpointAnswer:
    """Return the number of steps, to which ``publish`` and ``adapter`` can return."""
    session = training.get(session_id)
    await session.keep()
    step = session.num_steps
    weights = await training.weights(session_id, step)
    return CheckpointAnswer(session_id=session_id, step=step, adapter_sha256=weights.digest)


@routes.get("/v1/training/sessions/{session_id}/log", response_class=Response)
async def read_log(session_id: str, training: TrainingDep) -> Response:
    """Return the log: for each step its seed, uint64, and its coefficients, float32."""
    content = training.get(session_id).log()
    return Response(content, media_type="application/octet-stream")


@routes.post("/v1/training/sessions/{session_id}/publish")
async def publish_session(
    session_id: str, body: Publish, engine: EngineDep, training: TrainingDep
) -> AdapterCard:
    """Serve the adapter under a name from the next request on."""
    session = training.get(session_id)
    weights = await training.weights(session_id, body.step)
    upload = AdapterUpload(
        name=body.name,
        weights=weights,
        version=body.version,
        expected_version=body.expected_version,
        replaces=body.name in session.state.published or body.expected_version is not None,
    )
    info = await engine.control.load_adapter(upload, model=session.config.model)
    training.note_published(session_id, body.name)
    return card(info)


@routes.get("/v1/training/sessions/{session_id}/adapter", response_class=Response)
async def download_adapter(
    session_id: str,
    training: TrainingDep,
    format: Literal["peft", "mlx"] = "peft",  # noqa: A002 - the name in the query
    step: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """Return the adapter as a zip archive of the two files that PEFT or mlx-lm reads."""
    weights = await training.weights(session_id, step, of_checkpoint=format == "peft")
    headers = {"content-disposition": f'attachment; filename="{session_id}.zip"'}
    archive = adapter_archive(weights, format)
    return Response(archive, media_type="application/zip", headers=headers)


async def _steps(
    session_id: str, body: MakeSteps, engine: EngineClient, training: TrainingService
) -> Steps:
    examples = None
    if body.batch is not None:
        examples = await _examples(session_id, body.batch, engine, training, "batch")
    changes = StepChanges(body.seed, body.epsilon, body.learning_rate)
    made = await training.step(session_id, body.steps, examples, changes)
    data = [step_answer(each.record, each.losses if body.return_losses else None) for each in made]
    return Steps(session_id=session_id, data=data)


async def _examples(
    session_id: str,
    rows: Sequence[AnyRow],
    engine: EngineClient,
    training: TrainingService,
    param: str = DATA,
) -> list[Example]:
    """Read the rows of a field as the session's data were read."""
    config = training.get(session_id).config
    objective = OBJECTIVES.validate_python(config.objective)
    if isinstance(objective, Caller):
        raise InvalidRequestError("The objective caller reads no rows.", param=param)
    if isinstance(objective, Reward):
        return await _read(
            rows, objective, GENERATION.client(engine).get_model(config.model), param
        )
    model = model_of(config.model, objective, engine, makes_head=config.trainable.makes_head)
    return await _read(rows, objective, model, param)


async def _read(
    rows: Sequence[AnyRow],
    objective: Measured | Reward,
    model: PoolingModel | GenerationModel,
    param: str = DATA,
) -> list[Example]:
    """Read rows for an objective."""
    if isinstance(objective, Reward):
        assert isinstance(model, GenerationModel)
        texts = rows_as(rows, Row, param)
        return await in_thread(partial(prompts_of, texts, objective, model, param))
    return await examples_of(rows, objective, model, param)


async def _events(steps: AsyncIterator[StepRecord]) -> AsyncIterator[bytes]:
    async for record in steps:
        yield sse.data(step_answer(record).model_dump(mode="json"))
    yield sse.DONE
