"""Hugging Face's tasks: what each does, and which one a body means."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.encoded import ModelCall
from mlx_parallm.api.pooling.hf.entities import LabelledTokens, entities
from mlx_parallm.api.pooling.hf.generation import KEYS
from mlx_parallm.api.pooling.hf.schema import Job, TaskParameters
from mlx_parallm.api.pooling.inputs.encode import Reading, pair_inputs, single_inputs, text_limit
from mlx_parallm.api.pooling.inputs.request import prompted_inputs
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, is_list_of
from mlx_parallm.api.pooling.mlm.answer import fillings
from mlx_parallm.api.pooling.mlm.inputs import candidates_of, masked_inputs, num_masks
from mlx_parallm.api.pooling.vectors.arrays import (
    activated,
    as_bytes,
    check_dimensions,
    finished,
    ranked_labels,
    similarities,
    softmax,
)
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object
from mlx_parallm.types.pooling import PoolingInput, ProblemType, Task, TokenSpan

TOP_K = 5
#: PROBLEMS: the problem type with this function, for any number of labels.
PROBLEMS: dict[str, ProblemType] = {
    "sigmoid": "multi_label_classification",
    "none": "regression",
}
#: STRATEGY: the default of Hugging Face's servers; that of transformers itself is "none".
STRATEGY = "simple"
OUTSIDE = ["O"]


async def fill_mask(job: Job) -> Any:
    """Return the fillings of a text; a list for each mask if it has several, and for each text.

    Raises:
        ParallmError: see ``filled``.
    """
    parameters = job.parameters
    top_k, targets = parameters.top_k or TOP_K, parameters.targets
    answers, warnings = await filled(
        job.call, job.texts(), job.reading, top_k=top_k, targets=targets
    )
    job.warnings.extend(warnings)
    # transformers answers a list of one text as it does the text alone.
    return answers[0] if len(answers) == 1 else answers


async def filled(
    call: ModelCall,
    texts: Sequence[str],
    reading: Reading,
    *,
    top_k: int,
    targets: Iterable[str] | None,
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the fillings of each text, a list for each mask if it has several, and warnings.

    Args:
        call: a call of a masked LM.
        texts: texts with masks.
        reading: how the request has them read.
        top_k: number of fillings of a mask.
        targets: words to choose among; None: the whole vocabulary.

    Raises:
        ParallmError: see ``masked_inputs``, ``candidates_of`` and ``ModelCall.written``.
    """
    model = call.model
    words = await candidates_of(targets, model, "targets")
    task: Task = "mlm_logprobs" if words.ids else "mlm_top"
    inputs = await masked_inputs(texts, model, task, reading, words.ids, top_k=top_k)

    def write(text: PoolingInput, result: np.ndarray) -> list[Any]:
        masks = fillings(text, result, top_k, model)
        return masks[0] if len(masks) == 1 else masks

    answers, _ = await call.written(inputs, write)
    return answers, words.warnings


async def text_classification(job: Job) -> list[Any]:
    """Return a list of labels and scores for each text, also for a text alone.

    Raises:
        ParallmError: ``inputs`` is neither texts nor pairs; see also ``single_inputs`` and
            ``PoolingCall.written``.
    """
    inputs = await _inputs(job)
    labels = job.call.model.info.labels

    def write(_: PoolingInput, logits: np.ndarray) -> list[dict[str, Any]]:
        return ranked_labels(_scores(job, logits), labels)[: job.parameters.top_k]

    answers, _ = await job.call.written(inputs, write)
    return answers


async def _inputs(job: Job) -> tuple[PoolingInput, ...]:
    pairs: Any = [job.inputs] if is_object(job.inputs) else job.inputs
    if is_list_of(pairs, dict) and len(pairs) <= MAX_INPUTS:
        return await pair_inputs([_pair(each) for each in pairs], job.call.model, job.reading)
    return await single_inputs(job.texts(), job.call.model, "classify", job.reading)


def _pair(pair: dict[str, Any]) -> tuple[str, str]:
    first, second = pair.get("text"), pair.get("text_pair")
    if isinstance(first, str) and isinstance(second, str):
        return first, second
    raise InvalidRequestError(
        "A pair must have text and text_pair, and both must be texts.", param="inputs"
    )


def _scores(job: Job, logits: np.ndarray) -> np.ndarray:
    function = job.parameters.function_to_apply
    if function is None:
        return activated(logits, job.call.model.info.problem_type)
    if function == "softmax":
        return softmax(logits)
    return activated(logits, PROBLEMS[function])


async def token_classification(job: Job) -> list[Any]:
    """Return a list of entities for a text; for several a list of these.

    Raises:
        ParallmError: the request cuts texts at their beginnings; see also ``Job.texts``,
            ``single_inputs`` and ``PoolingCall.written``.
    """
    how, model = job.reading, job.call.model
    if how.from_left:
        raise InvalidRequestError(
            "truncation_direction must be right for token classification.",
            param="truncation_direction",
        )
    texts, tokenizer = job.texts(), model.tokenizer
    length, limit = sum(map(len, texts)), text_limit(model, how)
    spans = await maybe_in_thread(lambda: tokenizer.spans(texts, limit=limit), length)
    ids = [tuple(span.token_id for span in own) for own in spans]
    inputs = await single_inputs(ids, model, "token_classify", how)
    logits, _ = await job.call.written(inputs, lambda _, result: result)
    ignored = OUTSIDE if job.parameters.ignore_labels is None else job.parameters.ignore_labels
    strategy = job.parameters.aggregation_strategy or STRATEGY

    def write(own: list[TokenSpan], text: PoolingInput, rows: np.ndarray) -> list[dict[str, Any]]:
        kept = _kept(own, len(text.token_ids))
        tokens = LabelledTokens(
            [own[place] for place in kept], kept, softmax(rows[kept]), model.info.labels
        )
        all_entities = entities(tokens, strategy, tokenizer.join)
        return [entity for entity in all_entities if _label(entity) not in ignored]

    answers = await maybe_in_thread(lambda: list(map(write, spans, inputs, logits)), length)
    return answers if isinstance(job.inputs, list) else answers[0]


def _kept(spans: list[TokenSpan], length: int) -> list[int]:
    """Return the places of tokens of the text in an input that may have been cut to a length."""
    own = [place for place, span in enumerate(spans) if not span.is_special]
    behind = len(spans) - 1 - own[-1] if own else 0
    return [place for place in own if place < length - behind]


def _label(entity: dict[str, Any]) -> str:
    return entity["entity"] if "entity" in entity else entity["entity_group"]


async def feature_extraction(job: Job) -> list[Any]:
    """Return a list with a vector for each text, also for a text alone.

    Raises:
        ParallmError: see ``Job.texts``, ``single_inputs`` and ``PoolingCall.written``.
    """
    vectors = await _vectors(job, job.texts())
    if job.parameters.encoding_format == "base64":
        return [base64.b64encode(as_bytes(vector)).decode() for vector in vectors]
    return [vector.tolist() for vector in vectors]


async def sentence_similarity(job: Job) -> list[float]:
    """Return the cosine of each sentence with the source sentence.

    Raises:
        ParallmError: ``inputs`` lacks the sentences; see also ``feature_extraction``.
    """
    content = job.inputs if is_object(job.inputs) else {}
    source, sentences = content.get("source_sentence"), content.get("sentences")
    if not isinstance(source, str) or not is_list(sentences) or not 0 < len(sentences) < MAX_INPUTS:
        raise InvalidRequestError(
            "inputs must have source_sentence, a text, and sentences, a list of texts.",
            param="inputs",
        )
    return similarities(await _vectors(job, job.texts([source, *sentences])))


#: Does a task and returns the JSON of its answer.
Run = Callable[[Job], Awaitable[Any]]
#: The task that a model must be able to do, and its function, by Hugging Face's names.
TASKS: Mapping[str, tuple[Task, Run]] = {
    "fill-mask": ("mlm", fill_mask),
    "text-classification": ("classify", text_classification),
    "sentiment-analysis": ("classify", text_classification),
    "token-classification": ("token_classify", token_classification),
    "ner": ("token_classify", token_classification),
    "feature-extraction": ("embed", feature_extraction),
    "sentence-similarity": ("embed", sentence_similarity),
}
#: Hugging Face's first name of each task.
DEFAULTS: Mapping[Task, str] = {task: name for name, (task, _) in reversed(TASKS.items())}
#: Parameters that only one task has.
TASK_OF_PARAMETER: Mapping[str, str] = {
    "targets": "fill-mask",
    "function_to_apply": "text-classification",
    "aggregation_strategy": "token-classification",
    "ignore_labels": "token-classification",
    "normalize": "feature-extraction",
    "prompt_name": "feature-extraction",
    "dimensions": "feature-extraction",
    "encoding_format": "feature-extraction",
}


def choose(
    client: PoolingClient,
    inputs: Any,
    parameters: TaskParameters,
    *,
    name: str | None = None,
    task: str | None = None,
) -> tuple[PoolingModel, Run]:
    """Return the model, and the function of the task.

    The task is that of the path, else the one that the body implies, else the model's main one.
    Without a name, the model is the first that can do the task; without a task, the first whose
    mask token is in the text, else the first of all.

    Raises:
        ModelNotFoundError, InvalidRequestError: there is no such model, it cannot do the task, or
            the task is unknown.
    """
    task = task or _implied_task(inputs, parameters)
    if task is None:
        model = _first(client, inputs) if name is None else client.get(name, *DEFAULTS)
        default = next(DEFAULTS[each] for each in model.info.tasks if each in DEFAULTS)
        return model, TASKS[default][1]
    if task not in TASKS:
        known = ", ".join((*TASKS, *KEYS))
        raise InvalidRequestError(f"The task must be one of {known}.", param="task")
    needed, run = TASKS[task]
    return client.get(name, needed), run


def _implied_task(inputs: Any, parameters: TaskParameters) -> str | None:
    """Return the task that the body's inputs or parameters belong to; None: any task."""
    if isinstance(inputs, dict):
        return "sentence-similarity" if "sentences" in inputs else "text-classification"
    names = parameters.model_fields_set
    return next((task for field, task in TASK_OF_PARAMETER.items() if field in names), None)


def _first(client: PoolingClient, inputs: Any) -> PoolingModel:
    text = inputs[0] if is_list(inputs) and inputs else inputs
    for model in client.models():
        if "mlm" in model.info.tasks and isinstance(text, str) and num_masks(text, model):
            return model
    return client.get(None, *DEFAULTS)


async def _vectors(job: Job, texts: Sequence[str]) -> Sequence[np.ndarray]:
    """Return vectors as the parameters say, float32 ``[dimensions]`` each."""
    model, parameters = job.call.model, job.parameters
    check_dimensions(parameters.dimensions, model)
    inputs = await prompted_inputs(texts, model, "embed", job.reading, parameters.prompt_name)
    vectors, _ = await job.call.written(inputs, lambda _, result: result)
    options = (parameters.dimensions, parameters.normalize)
    return finished(vectors, "embed", model.info, *options)
