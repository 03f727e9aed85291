"""From the body of a new job to its session, its steps and its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request
from pydantic import ConfigDict, Field, StrictBool, StrictStr

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.fine_tuning.schema import AUTO, CreateJob, Hyperparameters
from mlx_parallm.api.http.dependencies import get_client
from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.mezo.conversations import conversation_input
from mlx_parallm.api.mezo.prompts import completion_tokens, end_token
from mlx_parallm.api.mezo.request import config_maker, trainable
from mlx_parallm.api.mezo.schema import CreateSession
from mlx_parallm.api.mezo.stored_lines import content_of, parsed_lines
from mlx_parallm.batch_jobs.service import BatchService
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.training.jobs.files import JobFiles
from mlx_parallm.training.jobs.records import JobSettings, Method
from mlx_parallm.training.jobs.service import JobService
from mlx_parallm.training.records import Example
from mlx_parallm.training.service import TrainingService
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import ChoiceInput, num_tokens

#: ``RATE``: Adam's learning rate for a multiplier of 1, usual for LoRA.
RATE = 2e-4
AUTO_EPOCHS, AUTO_MOST_BATCH = 3, 16


class ConversationLine(NullIsAbsent):
    """A line of a supervised job's file."""

    model_config = ConfigDict(extra="forbid")

    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: StrictBool | None = None
    prompt: StrictStr | None = None
    completion: StrictStr | None = None


async def new_job(
    body: CreateJob,
    request: Request,
    engine: EngineClient,
    training: TrainingService,
    jobs: JobService,
) -> JobFiles:
    """Return a new job, whose session was created.

    Raises:
        NotFoundError: the caller has no such file.
        ModelNotFoundError: nothing has the model's name.
        InvalidRequestError: a field or a line of a file cannot be used; the message names it.
        ConflictError: there are too many sessions.
    """
    method, hyper = _method(body)
    model = trainable(GENERATION.client(engine), body.model)
    if model.parent is not None:
        raise InvalidRequestError(f"{body.model} is an adapter; name its model.", param="model")
    max_rank = engine.config.adapters.max_rank
    if hyper.rank > max_rank:
        raise InvalidRequestError(
            f"rank is {hyper.rank}; --max-lora-rank is {max_rank}.", param="hyperparameters.rank"
        )
    owner = await get_client(request)
    read = _reader(request.app.state.batches, owner, model, hyper)
    examples = await read(body.training_file, "training_file")
    validation = None
    if body.validation_file is not None:
        validation = await read(body.validation_file, "validation_file")
    settings = _settings(body, method, hyper, owner, model.names[0], len(examples))
    session_body = _session_body(body, settings)
    session = await training.create(
        config_maker(session_body, model.names[0]), examples, start=None
    )
    return jobs.create(settings, session.config.id, validation)


def _method(body: CreateJob) -> tuple[Method, Hyperparameters]:
    """Return what a job learns from, and how.

    Raises:
        InvalidRequestError: it is not served.
    """
    if body.integrations:
        raise InvalidRequestError("Integrations are not served.", param="integrations")
    if body.method is None:
        return Method.SUPERVISED, body.hyperparameters or Hyperparameters.model_validate({})
    kind = body.method.type
    if kind == "reinforcement":
        raise InvalidRequestError(
            "method.type reinforcement is not served: sample with /v1/rl/rollout, and train a "
            "session of /v1/training/sessions with the objective policy.",
            param="method",
        )
    if kind != Method.SUPERVISED:
        raise InvalidRequestError(
            f"method.type {kind} is not served yet by jobs: train a session of "
            "/v1/training/sessions with the objective pairs.",
            param="method",
        )
    own = body.method.supervised
    return (
        Method.SUPERVISED,
        own.hyperparameters if own else body.hyperparameters or Hyperparameters.model_validate({}),
    )


def _settings(
    body: CreateJob,
    method: Method,
    hyper: Hyperparameters,
    owner: str,
    model: str,
    num_examples: int,
) -> JobSettings:
    """Return what the job is asked for, "auto" replaced."""
    batch = hyper.batch_size
    if batch == AUTO:
        batch = min(max(1, num_examples // 10), AUTO_MOST_BATCH)
    epochs = AUTO_EPOCHS if hyper.n_epochs == AUTO else hyper.n_epochs
    multiplier = 1.0 if hyper.learning_rate_multiplier == AUTO else hyper.learning_rate_multiplier
    an_epoch = max(1, num_examples // min(batch, num_examples))
    chosen = {
        "n_epochs": epochs,
        "batch_size": min(batch, num_examples),
        "learning_rate_multiplier": multiplier,
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
        num_steps=epochs * an_epoch,
        eval_every=hyper.eval_every or an_epoch,
        metadata=body.metadata,
    )


def _session_body(body: CreateJob, settings: JobSettings) -> CreateSession:
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
            },
            "estimator": {
                "kind": "gradient",
                "optimizer": "adamw",
                "learning_rate": RATE * hyper["learning_rate_multiplier"],
                "decay_steps": settings.num_steps,
            },
            "objective": {"kind": "completion"},
            "batch_size": hyper["batch_size"],
            "seed": body.seed,
        }
    )


def _reader(
    batches: BatchService, owner: str, model: GenerationModel, hyper: Hyperparameters
) -> Callable[[str, str], Any]:
    """Return what reads a caller's file for a model; its arguments are the id and the field."""

    async def read(file_id: str, field: str) -> list[Example]:
        content = await content_of(batches, file_id, owner, field)
        most = min(hyper.max_tokens or model.max_model_len, model.max_model_len)
        return await in_thread(lambda: conversation_examples(content, model, field, most))

    return read


def conversation_examples(
    content: bytes, model: GenerationModel, field: str, max_tokens: int
) -> list[Example]:
    """Return the examples of a file whose lines are conversations, or prompts with completions.

    Args:
        content: JSON lines.
        model: reads them.
        field: the field of the body that names the file, for errors.
        max_tokens: most tokens of an example.

    Raises:
        InvalidRequestError: a line cannot be used; the message has its number, from 1.
    """

    def read(value: Any, line: int) -> Example:
        del line
        item = _line_input(ConversationLine.model_validate(value), model)
        count = num_tokens(item) + 1
        if count > max_tokens:
            raise InvalidRequestError(f"it has {count} tokens, and {max_tokens} are allowed")
        return Example(item, 0)

    return parsed_lines(content, read, param=field, what="examples")


def _line_input(line: ConversationLine, model: GenerationModel) -> ChoiceInput:
    if line.messages is not None:
        if line.prompt is not None or line.completion is not None:
            raise InvalidRequestError("it has messages and a prompt or a completion")
        return conversation_input(line.messages, line.tools, model)
    if line.prompt is None or line.completion is None:
        raise InvalidRequestError("it needs messages, or a prompt and a completion")
    return _completion_input(line.prompt, line.completion, model)


def _completion_input(prompt: str, completion: str, model: GenerationModel) -> ChoiceInput:
    """Return a prompt with its completion, which an end token follows."""
    completed = completion_tokens(completion, end_token(model), model)
    prompted = tuple(model.tokenizer.encode(prompt))
    if not prompted or not completed:
        raise InvalidRequestError("the prompt or the completion has no token")
    return ChoiceInput(prompted, (completed,), averages=True)
