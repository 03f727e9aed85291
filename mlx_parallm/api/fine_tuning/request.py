"""From the body of a new job to its session, its steps and its record."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence

from fastapi import Request

from mlx_parallm.api.fine_tuning.lines import file_examples, line_reader
from mlx_parallm.api.fine_tuning.schema import (
    AUTO,
    CreateJob,
    Hyperparameters,
    PreferenceHyperparameters,
)
from mlx_parallm.api.http.dependencies import get_client
from mlx_parallm.api.http.forms import metadata_pairs
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.mezo.request import config_maker, model_of, trainable
from mlx_parallm.api.mezo.schema import MAX_STEPS, NEW_HEAD, Completion, CreateSession, Pairs
from mlx_parallm.api.mezo.stored_lines import stored_path
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.training.jobs.files import JobFiles
from mlx_parallm.training.jobs.records import JobSettings, Method
from mlx_parallm.training.jobs.service import JobService
from mlx_parallm.training.records import Example
from mlx_parallm.types.errors import InvalidRequestError

#: ``RATES``: Adam's learning rate for a multiplier of 1: that of TRL's scripts for LoRA.
RATES = {Method.SUPERVISED: 2e-4, Method.DPO: 5e-6, Method.REWARD: 1e-4}
#: ``SESSION_FIELDS``: the fields of a session that its creation refuses, and those of its job.
SESSION_FIELDS = {
    "trainable.targets": "{place}.targets",
    "trainable.layers": "{place}.layers",
    "trainable.head": "model",
    "data": "training_file",
}
AUTO_EPOCHS, AUTO_MOST_BATCH, AUTO_BETA = 3, 16, 0.1


async def new_job(
    body: CreateJob,
    request: Request,
    engine: EngineClient,
    jobs: JobService,
) -> JobFiles:
    """Return a new job, whose session was created.

    Raises:
        NotFoundError: the caller has no such file.
        ModelNotFoundError: nothing has the model's name.
        InvalidRequestError: a field or a line of a file cannot be used; the message names it.
        ConflictError: there are too many sessions, or jobs cannot be kept.
    """
    method, hyper = _method(body)
    objective = _objective(method, hyper)
    model = _model_of(method, objective, body.model, engine)
    place, max_rank = _place(body, method), engine.config.adapters.max_rank
    if hyper.rank > max_rank:
        raise InvalidRequestError(
            f"{place}.rank is {hyper.rank}; --max-lora-rank is {max_rank}.", param=f"{place}.rank"
        )
    longest = model.info.max_model_len if isinstance(model, PoolingModel) else model.max_model_len
    read_line = line_reader(objective, model, min(hyper.max_tokens or longest, longest))
    owner = await get_client(request)
    state = request.app.state

    async def read(file_id: str, field: str) -> list[Example]:
        max_bytes = state.config.max_training_session_bytes
        path = await stored_path(state.batches, file_id, owner, field, max_bytes)
        return await in_thread(lambda: file_examples(path, read_line, field))

    examples = await read(body.training_file, "training_file")
    validation: list[Example] = []
    if body.validation_file is not None:
        validation = await read(body.validation_file, "validation_file")
    settings = job_settings(body, method, hyper, owner, model.names[0], len(examples))
    session_body = session_of(settings, objective, _head(model))
    has_score = isinstance(model, PoolingModel)
    make = config_maker(session_body, model.names[0], has_score=has_score)
    with _fields_of_job(place):
        return await jobs.begin(settings, make, examples, validation)


def _method(body: CreateJob) -> tuple[Method, Hyperparameters]:
    """Return what a job learns from, and how.

    Raises:
        InvalidRequestError: it is not served.
    """
    if body.integrations:
        raise InvalidRequestError("Integrations are not served.", param="integrations")
    kind = "supervised" if body.method is None else body.method.type
    if kind == "reinforcement":
        raise InvalidRequestError(
            "method.type reinforcement is not served: sample with /v1/rl/rollout, and train a "
            "session of /v1/training/sessions with the objective policy.",
            param="method",
        )
    method = Method(kind)
    own = None
    for each in Method:
        settings = None if body.method is None else getattr(body.method, each)
        if each is method:
            own = settings
        elif settings is not None:
            raise InvalidRequestError(
                f"method.{each} is for method.type {each}, and this job's is {method}.",
                param=f"method.{each}",
            )
    if body.hyperparameters is not None and method is not Method.SUPERVISED:
        raise InvalidRequestError(
            f"hyperparameters is for supervised jobs; this one's are method.{method}."
            "hyperparameters.",
            param="hyperparameters",
        )
    if body.hyperparameters is not None and own is not None:
        raise InvalidRequestError(
            "hyperparameters is in place of method.supervised; leave one of them out.",
            param="hyperparameters",
        )
    if own is not None:
        return method, own.hyperparameters
    kinds = PreferenceHyperparameters if method is Method.DPO else Hyperparameters
    return method, body.hyperparameters or kinds.model_validate({})


def _place(body: CreateJob, method: Method) -> str:
    """Return the field of the body that has the hyper-parameters."""
    own = f"method.{method}.hyperparameters"
    return own if body.hyperparameters is None else "hyperparameters"


@contextlib.contextmanager
def _fields_of_job(place: str) -> Generator[None]:
    """Name the fields of a job in errors about those of its session."""
    try:
        yield
    except InvalidRequestError as problem:
        field = SESSION_FIELDS.get(problem.param or "")
        if problem.param is None or field is None:
            raise
        named = field.format(place=place)
        message = str(problem).replace(problem.param, named)
        raise InvalidRequestError(message, param=named, code=problem.code) from None


def _model_of(
    method: Method, objective: Completion | Pairs, name: str, engine: EngineClient
) -> PoolingModel | GenerationModel:
    """Return the model of a job; raise InvalidRequestError if it cannot learn by the method."""
    status = engine.find(name)
    generates = status is not None and isinstance(status.model, GenerationModel)
    if method is Method.REWARD and generates:
        raise InvalidRequestError(
            f"{name} generates, and a job of reward trains a model that scores texts; method.type "
            "dpo trains those that generate.",
            param="model",
        )
    if method is Method.DPO and not generates:
        # The objective of pairs would take models that score.
        trainable(GENERATION.client(engine), name)
    return model_of(name, objective, engine, makes_head=method is Method.REWARD)


def _objective(method: Method, hyper: Hyperparameters) -> Completion | Pairs:
    """Return the objective of a job's session."""
    if method is Method.SUPERVISED:
        return Completion.model_validate({})
    return Pairs.model_validate({"beta": _beta(hyper)})


def _beta(hyper: Hyperparameters) -> float:
    beta = hyper.beta if isinstance(hyper, PreferenceHyperparameters) else AUTO
    return AUTO_BETA if beta == AUTO else beta


def job_settings(
    body: CreateJob,
    method: Method,
    hyper: Hyperparameters,
    owner: str,
    model: str,
    num_examples: int,
) -> JobSettings:
    """Return the settings of the job, "auto" replaced.

    Raises:
        InvalidRequestError: a session does not make so many steps.
    """
    batch = hyper.batch_size
    if batch == AUTO:
        batch = min(max(1, num_examples // 10), AUTO_MOST_BATCH)
    batch = min(batch, num_examples)
    epochs = AUTO_EPOCHS if hyper.n_epochs == AUTO else hyper.n_epochs
    multiplier = 1.0 if hyper.learning_rate_multiplier == AUTO else hyper.learning_rate_multiplier
    # As many examples as the epochs have, rounded up to whole batches.
    num_steps = math.ceil(epochs * num_examples / batch)
    if num_steps > MAX_STEPS:
        field = f"{_place(body, method)}.n_epochs"
        raise InvalidRequestError(
            f"{field}: {epochs} epochs are {num_steps} steps of batch_size {batch}, and a job has "
            f"at most {MAX_STEPS}.",
            param=field,
        )
    chosen = {
        "n_epochs": epochs,
        "batch_size": batch,
        "learning_rate_multiplier": multiplier,
        **({"beta": _beta(hyper)} if method is Method.DPO else {}),
    }
    return JobSettings(
        owner=owner,
        model=model,
        method=method,
        hyperparameters=hyper.model_dump(mode="json") | chosen,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        seed=body.seed,
        num_steps=num_steps,
        eval_every=hyper.eval_every or math.ceil(num_examples / batch),
        metadata=body.metadata,
    )


def _head(model: PoolingModel | GenerationModel) -> bool | str:
    """Return which head a job trains: that of a model with one score, or a new one."""
    if not isinstance(model, PoolingModel):
        return False
    return True if model.info.has_one_score else NEW_HEAD


def session_of(
    settings: JobSettings, objective: Completion | Pairs, head: bool | str
) -> CreateSession:
    """Return the session that a job is."""
    hyper = settings.hyperparameters
    return CreateSession.model_validate(
        {
            "model": settings.model,
            "trainable": {
                "rank": hyper["rank"],
                "alpha": hyper["alpha"],
                "targets": hyper["targets"],
                "layers": hyper["layers"],
                "train": "ab",
                "init": "random",
                "head": head,
            },
            "estimator": {
                "kind": "gradient",
                "optimizer": "adamw",
                "learning_rate": RATES[settings.method] * hyper["learning_rate_multiplier"],
                "decay_steps": settings.num_steps,
            },
            "objective": objective.model_dump(mode="json"),
            "batch_size": hyper["batch_size"],
            "eval_every": settings.eval_every,
            "seed": settings.seed,
        }
    )


def metadata_filter(
    value: str | None, query: Sequence[tuple[str, str]]
) -> Callable[[Mapping[str, str] | None], bool]:
    """Return what is True of the metadata of jobs that a list is to have.

    Args:
        value: the parameter ``metadata``.
        query: all parameters, of which ``metadata[key]`` name a value.

    Raises:
        InvalidRequestError: ``metadata`` is not null, or comes with such parameters.
    """
    wanted = metadata_pairs(query).items()
    if value is None:
        return lambda metadata: wanted <= (metadata or {}).items()
    if value != "null" or wanted:
        raise InvalidRequestError(
            "metadata is null, or metadata[key]=value for each key.", param="metadata"
        )
    return lambda metadata: metadata is None
