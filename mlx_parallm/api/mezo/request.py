"""From the body of a new session to its settings, and from rows to examples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fastapi import Request
from pydantic import TypeAdapter

from mlx_parallm.api.http.dependencies import get_client
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.mezo.estimators import estimator_of, loss_of, without_gradient
from mlx_parallm.api.mezo.pairs import pair_examples, policy_examples
from mlx_parallm.api.mezo.prompts import prompt_examples
from mlx_parallm.api.mezo.rows import AnyRow, PairRow, PolicyRow, Row, rows_as
from mlx_parallm.api.mezo.schema import (
    NEW_HEAD,
    AnyObjective,
    Caller,
    CreateSession,
    EstimatorBody,
    Labels,
    LabelWords,
    Measured,
    Objective,
    OfPrompts,
    OfTexts,
    Pairs,
    Policy,
    Reward,
)
from mlx_parallm.api.mezo.stored_lines import lines_of, parsed_lines, stored_path
from mlx_parallm.api.pooling.inputs.encode import Reading, single_inputs
from mlx_parallm.api.pooling.mlm.inputs import MASK, candidates_of, masked_inputs, num_masks
from mlx_parallm.api.turns.prelude import refuse_sources
from mlx_parallm.batch_jobs.service import BatchService
from mlx_parallm.generation.kind import GENERATION, GenerationClient
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.training.mezo.copies import Copy
from mlx_parallm.training.records import Example, SessionConfig
from mlx_parallm.training.settings import Sides
from mlx_parallm.training.start import StartParameters
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadingError
from mlx_parallm.types.pooling import PoolingInput, Task
from mlx_parallm.types.training import FirstFactors, TrainableSpec

DATA, VALIDATION = "data", "validation"
#: ``NOT_TRAINED``: why a model with an encoder has no session.
NOT_TRAINED = "MeZO does not train"
# DATA_FIELDS: fields of the body that say how data are read.
DATA_FIELDS = (
    "data",
    "validation",
    "eval_every",
    "batch_size",
    "batches",
    "mode",
    "max_batch_tokens",
)
TEXT = "{text}"
ROW: TypeAdapter[Row | PairRow | PolicyRow] = TypeAdapter(AnyRow)
OBJECTIVES: TypeAdapter[AnyObjective] = TypeAdapter(Objective)


def config_maker(
    body: CreateSession,
    model: str,
    start: StartParameters | None = None,
    *,
    has_score: bool = False,
) -> Callable[[str, int], SessionConfig]:
    """Return what makes the settings of a session of its id and its time.

    Args:
        body: the request.
        model: the first name of the model.
        start: the adapter's parameters that it starts from; None: it begins with a new one.
        has_score: see ``loss_of``.
    """
    paths = () if start is None else tuple(sorted(start.first))
    loss = loss_of(body, has_score=has_score)

    def make(session_id: str, created_at: int) -> SessionConfig:
        return SessionConfig(
            id=session_id,
            model=model,
            trainable=replace(_trainable(body), paths=paths),
            estimator=estimator_of(body.estimator),
            measure=None if isinstance(body.objective, Caller) else body.objective.measure,
            objective=body.objective.model_dump(mode="json"),
            batch_size=0 if isinstance(body.objective, Caller) else body.batch_size,
            order=body.batches,
            mode=body.mode,
            max_tokens=body.max_batch_tokens,
            seed=body.seed,
            created_at=created_at,
            adapter=body.adapter,
            loss=loss,
            eval_every=body.eval_every,
        )

    return make


def _trainable(session: CreateSession) -> TrainableSpec:
    body = session.trainable
    top = layers = None
    if isinstance(body.layers, str):
        top = int(body.layers.removeprefix("top:")) if body.layers != "all" else None
    else:
        layers = tuple(body.layers)
    trains_first = body.train == "ab"
    # Both factors of a LoRA are trained where gradients are taken, as everywhere.
    is_usual = session.is_paper or session.takes_gradients
    if is_usual and "train" not in body.model_fields_set:
        trains_first = True
    # What is measured needs examples.
    is_random = is_usual or isinstance(session.objective, Caller)
    return TrainableSpec(
        targets=tuple(body.targets),
        layers=layers,
        top=top,
        rank=body.rank,
        alpha=body.alpha,
        trains_first=trains_first,
        seed=session.seed,
        init=body.init or (FirstFactors.RANDOM if is_random else FirstFactors.ACTIVATIONS),
        trains_head=body.head is True,
        makes_head=body.head == NEW_HEAD,
    )


def _check_batch(body: CreateSession, num_examples: int) -> None:
    """Raise InvalidRequestError if the data have no batch, or it cannot be divided."""
    if isinstance(body.objective, Policy) and not num_examples:
        return
    if body.batch_size > num_examples:
        raise InvalidRequestError(
            f"batch_size is {body.batch_size}, and the data has {num_examples} examples.",
            param="batch_size",
        )
    if not isinstance(body.estimator, EstimatorBody):
        return
    if body.estimator.groups and body.batch_size % body.estimator.directions:
        raise InvalidRequestError(
            f"batch_size {body.batch_size} cannot be divided into {body.estimator.directions} "
            "equal groups.",
            param="batch_size",
        )


def check_validation(body: CreateSession) -> None:
    """Raise InvalidRequestError if validation data are there that nothing evaluates, or missing."""
    if body.validation is None:
        if body.eval_every is not None:
            raise InvalidRequestError(
                "eval_every is about validation, which is missing.", param="eval_every"
            )
        return
    if not body.takes_gradients:
        raise InvalidRequestError(
            "validation needs estimator.kind gradient; evaluate other sessions by evaluate.",
            param="validation",
        )
    if isinstance(body.objective, Policy):
        raise InvalidRequestError(
            "The objective policy has no labels to evaluate.", param="validation"
        )


def check_caller(body: CreateSession) -> None:
    """Raise InvalidRequestError for fields about data."""
    for field in DATA_FIELDS:
        if field in body.model_fields_set and getattr(body, field) is not None:
            raise InvalidRequestError(
                f"{field} is about data, and the objective caller has none.", param=field
            )
    if body.trainable.init is FirstFactors.ACTIVATIONS:
        raise InvalidRequestError(
            "trainable.init: activations are those of data, and the objective caller has none.",
            param="trainable.init",
        )


def check_copies(body: CreateSession, max_adapters: int) -> None:
    """Raise InvalidRequestError if a step's copies cannot be served as adapters."""
    if not isinstance(body.estimator, EstimatorBody):
        raise without_gradient(body.objective.kind)
    if body.estimator.groups:
        raise InvalidRequestError(
            "estimator.groups divides the batches of forwards, and this objective has none.",
            param="estimator.groups",
        )
    sides = body.estimator.directions
    count = 2 * sides if body.estimator.kind is Sides.TWO_SIDED else sides + 1
    if count > max_adapters:
        raise InvalidRequestError(
            f"A step would have {count} adapters, and --max-cpu-loras is {max_adapters}.",
            param="estimator.directions",
        )


def check_size(body: CreateSession, num_examples: int, max_rank: int) -> None:
    """Raise InvalidRequestError if a batch or the adapter would be too large.

    See ``check_validation`` too.
    """
    _check_batch(body, num_examples)
    check_validation(body)
    check_rank(body, max_rank)


def check_rank(body: CreateSession, max_rank: int) -> None:
    """Raise InvalidRequestError if the adapter would be too large."""
    if body.trainable.rank > max_rank:
        raise InvalidRequestError(
            f"trainable.rank is {body.trainable.rank}; adapters of more than --max-lora-rank "
            f"{max_rank} could not be published.",
            param="trainable.rank",
        )


def task_of(objective: OfTexts) -> Task:
    """Return what a model must be able to do for an objective."""
    return "mlm" if isinstance(objective, LabelWords) else "classify"


def trainable(client: GenerationClient, name: str) -> GenerationModel:
    """Return the model of this name; raise InvalidRequestError if it is an encoder-decoder."""
    return refuse_sources(client.get_model(name), name, NOT_TRAINED)


def model_of(
    name: str, objective: Measured, engine: EngineClient, *, makes_head: bool
) -> PoolingModel | GenerationModel:
    """Return the model of a session; raise as ``EngineClient`` does for a name of its kind.

    ``makes_head``: see ``TrainableSpec``.
    """
    if isinstance(objective, OfPrompts | Policy):
        model: PoolingModel | GenerationModel = trainable(GENERATION.client(engine), name)
    elif isinstance(objective, Pairs):
        model = _model_of_pairs(name, engine, makes_head=makes_head)
    else:
        model = POOLING.client(engine).get(name, task_of(objective))
    if model.parent is not None:
        raise InvalidRequestError(f"{name} is an adapter; name its model.", param="model")
    return model


def _model_of_pairs(
    name: str, engine: EngineClient, *, makes_head: bool
) -> PoolingModel | GenerationModel:
    status = engine.find(name)
    if status is None or not isinstance(status.model, PoolingModel):
        generator = trainable(GENERATION.client(engine), name)
        if makes_head:
            raise InvalidRequestError(
                f"trainable.head: {name} generates, and takes no new head.", param="trainable.head"
            )
        return generator
    return with_score(status.model, makes_head=makes_head)


def with_score(model: PoolingModel, *, makes_head: bool) -> PoolingModel:
    """Return a model with one score, or that gets one; raise InvalidRequestError if it has none."""
    if not model.info.has_one_score and not makes_head:
        raise InvalidRequestError(
            f"{model.names[0]} has no score of one label, and pairs compare one score: "
            f'trainable.head "{NEW_HEAD}" trains a new one.',
            param="trainable.head",
        )
    return model


def base_of(name: str, engine: EngineClient) -> str:
    """Return the first name of a model of any kind.

    Raises:
        ModelNotFoundError: nothing has the name.
        ModelLoadingError: it is loaded for the first time.
        InvalidRequestError: it is an adapter.
    """
    status = engine.find(name)
    if status is None:
        raise engine.not_found(name)
    if status.model is None:
        raise ModelLoadingError(name)
    if status.model.parent is not None:
        raise InvalidRequestError(f"{name} is an adapter; name its model.", param="model")
    if isinstance(status.model, GenerationModel):
        refuse_sources(status.model, name, NOT_TRAINED)
    return status.model.names[0]


async def rows_of(
    data: str | Sequence[AnyRow], request: Request, param: str = DATA
) -> Sequence[AnyRow]:
    """Return the rows of a field of the body, or of a file of the caller.

    Raises:
        NotFoundError: the caller has no such file.
        InvalidRequestError: the file has another purpose, or a line is no row.
    """
    if not isinstance(data, str):
        return data
    batches: BatchService | None = request.app.state.batches
    if batches is None:
        raise InvalidRequestError("Files are kept with --data-dir only.", param=param)
    max_bytes = request.app.state.config.max_training_session_bytes
    path = await stored_path(batches, data, await get_client(request), param, max_bytes)
    return await asyncio.to_thread(parsed_rows, path, param)


def parsed_rows(path: Path, param: str = DATA) -> list[AnyRow]:
    """Return the rows of a file, one as JSON in each line; raise InvalidRequestError."""

    def read(value: Any, line: int) -> AnyRow:
        return ROW.validate_python(value).on_line(line)

    return parsed_lines(lines_of(path), read, param=param, what="rows")


async def examples_of(
    rows: Sequence[AnyRow],
    objective: Measured,
    model: PoolingModel | GenerationModel,
    param: str = DATA,
) -> list[Example]:
    """Return examples for a model; ``param`` is the field of the body that has the rows.

    Raises:
        InvalidRequestError: a label, a word or a template is not usable; the message names it.
        ContextLengthError: a text is too long.
    """
    if isinstance(objective, Pairs):
        return await pair_examples(rows_as(rows, PairRow, param), objective, model, param)
    if isinstance(objective, Policy):
        samples = rows_as(rows, PolicyRow, param)
        generator = cast("GenerationModel", model)
        return await in_thread(lambda: policy_examples(samples, generator, param))
    texts = rows_as(rows, Row, param)
    if isinstance(objective, OfPrompts):
        return await prompt_examples(texts, objective, cast("GenerationModel", model), param)
    return await _labelled_texts(texts, objective, cast("PoolingModel", model), param)


async def _labelled_texts(
    rows: Sequence[Row], objective: OfTexts, model: PoolingModel, param: str
) -> list[Example]:
    names = list(objective.label_words) if isinstance(objective, LabelWords) else model.info.labels
    if len(names) < 2:
        raise InvalidRequestError(
            f"{model.names[0]} has a single score and no labels to choose between.", param="model"
        )
    every = [row.place(number, param) for number, row in enumerate(rows)]
    labels = [row.label_index(names, place, param) for row, place in zip(rows, every, strict=True)]
    for row, place in zip(rows, every, strict=True):
        unread = "messages" if row.messages is not None else "a completion"
        if row.messages is not None or row.completion is not None:
            raise InvalidRequestError(
                f"{place} has {unread}, which only models that generate read.", param=param
            )
    inputs: list[PoolingInput | None] = [None] * len(rows)
    for is_text in (True, False):
        places = [place for place, row in enumerate(rows) if (row.text is not None) is is_text]
        if places:
            sources = [_source(rows[place], objective) for place in places]
            reading = Reading(param=param, places=[every[place] for place in places])
            made = await _inputs(sources, objective, model, reading)
            for place, item in zip(places, made, strict=True):
                inputs[place] = item
    return [
        Example(item, label) for item, label in zip(inputs, labels, strict=True) if item is not None
    ]


def _source(row: Row, objective: OfTexts) -> Any:
    if row.text is None:
        return row.token_ids
    return objective.template.replace(TEXT, row.text)


async def _inputs(
    sources: Sequence[Any], objective: OfTexts, model: PoolingModel, reading: Reading
) -> Sequence[PoolingInput]:
    if isinstance(objective, Labels):
        return await single_inputs(sources, model, "classify", reading)
    words = await label_words(objective, model)
    inputs = await masked_inputs(sources, model, "mlm", reading, words)
    for item, place in zip(inputs, reading.places, strict=True):
        if len(item.places) != 1:
            raise InvalidRequestError(
                f"{place} has {len(item.places)} masks instead of one.", param=reading.param
            )
    return inputs


async def label_words(objective: LabelWords, model: PoolingModel) -> tuple[int, ...]:
    """Return the token of each label.

    Raises:
        InvalidRequestError: a word is not one token, or two are the same.
    """
    param = "objective.label_words"
    words = await candidates_of(objective.label_words, model, param)
    if words.warnings:
        raise InvalidRequestError(words.warnings[0], param=param)
    return words.ids


def check_template(objective: Measured | Reward, model: PoolingModel | GenerationModel) -> None:
    """Raise InvalidRequestError if a template has no place for the text, or not one mask."""
    if isinstance(objective, Pairs | Policy):
        return
    template, param = objective.template, "objective.template"
    if template.count(TEXT) != 1:
        raise InvalidRequestError(f"The template must have {TEXT} once.", param=param)
    if not isinstance(objective, LabelWords) or not isinstance(model, PoolingModel):
        return
    if num_masks(template, model) != 1:
        raise InvalidRequestError(f"The template must have {MASK} once.", param=param)


def told_losses(
    losses: Mapping[str, float] | Sequence[float], copies: Sequence[Copy]
) -> list[float]:
    """Return the losses of a body in the order of the copies.

    Raises:
        InvalidRequestError: one is missing, or there are others.
    """
    names = [copy.name for copy in copies]
    if not isinstance(losses, Mapping):
        if len(losses) != len(names):
            raise InvalidRequestError(
                f"losses has {len(losses)} values; {len(names)} were asked for.", param="losses"
            )
        return list(losses)
    missing = [name for name in names if name not in losses]
    if missing:
        raise InvalidRequestError(f"losses has none of {missing[0]}.", param="losses")
    unknown = [name for name in losses if name not in names]
    if unknown:
        raise InvalidRequestError(
            f"losses has {unknown[0][:100]!r}, which was not asked for.", param="losses"
        )
    return [losses[name] for name in names]
