"""How well texts fit queries, by a cross-encoder or by vectors of texts or of their tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlx_parallm.api.pooling.embeddings.answer import unit_vectors
from mlx_parallm.api.pooling.encoded import encoded
from mlx_parallm.api.pooling.inputs.encode import Role, pair_inputs, single_inputs
from mlx_parallm.api.pooling.inputs.prompts import prompt_of_type
from mlx_parallm.api.pooling.late_interaction import (
    document_inputs,
    max_sim,
    query_inputs,
    side_vectors,
)
from mlx_parallm.api.pooling.score.schema import ScoreRequest
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import PoolingClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput, EncoderInfo, LateInteraction

#: What is made of a cross-encoder's logit: what its files ask for, the logistic function, nothing.
Activation = Literal["default", "sigmoid", "none"]


#: What vLLM calls the two sides of its pairs, in their order.
SIDES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Texts to be compared.

    Attributes:
        queries: one for all documents, or as many as there are.
        documents: at least one.
        params: what the body calls the two.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    params: tuple[str, str] = ("query", "documents")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScores:
    """A score for each document, and the tokens that were read for them."""

    values: list[float]
    num_tokens: int


def pairs_of(body: ScoreRequest) -> Pairs:
    """The pairs that a body of vLLM's names.

    Raises:
        InvalidRequestError: not exactly two sides are there, or their lengths do not fit.
    """
    told = {name for pair in SIDES for name in pair} & body.model_fields_set
    names = next((pair for pair in SIDES if set(pair) == told), None)
    if names is None:
        known = ", ".join(f"{first} and {second}" for first, second in SIDES)
        raise InvalidRequestError(
            f"Give {known}; or query and items.", param=min(told, default="text_1")
        )
    queries, documents = getattr(body, names[0]), getattr(body, names[1])
    if not all(isinstance(one, str) for one in documents):
        raise InvalidRequestError(f"{names[1]} must be texts.", param=names[1])
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            f"{names[0]} has {len(queries)} texts: it needs one, or as many as {names[1]}.",
            param=names[0],
        )
    return Pairs(queries=queries, documents=documents, params=names)


def scoring_model(encoders: PoolingClient, name: str | None) -> PoolingModel:
    """The model of this name, else the one that was made most for ranking; see ``_rank``.

    Raises:
        ModelNotFoundError: none has the name.
        InvalidRequestError: it cannot score pairs.
    """
    if name is not None:
        found = encoders.get(name, "classify", "embed")
        if not (_reads_pairs(found.info) or _embeds(found.info)):
            raise InvalidRequestError(
                f"{name} tells {len(found.info.labels)} labels apart; "
                "one that scores pairs has one label, or gives vectors.",
                param="model",
            )
        return found
    able = [one for one in encoders.models() if _reads_pairs(one.info) or _embeds(one.info)]
    if not able:
        raise InvalidRequestError("No model that can score pairs is served here.", param="model")
    # The first of equals.
    return min(able, key=lambda one: _rank(one.info))


async def score_pairs(
    encoders: PoolingClient,
    model: PoolingModel,
    pairs: Pairs,
    *,
    request_id: str,
    activation: Activation = "default",
    truncate: int | None = None,
) -> PairScores:
    """The score of each document.

    A cross-encoder reads query and document together, as sentence-transformers' ``CrossEncoder``
    has it; of an embedder it is the cosine of their vectors, and of one that was made to compare
    tokens MaxSim. The latter two put the model's own prompts before both.

    Args:
        encoders: where they are computed.
        model: one of ``scoring_model``.
        pairs: what is compared.
        request_id: of the work, new.
        activation: of a cross-encoder.
        truncate: see ``single_inputs``.

    Raises:
        InvalidRequestError, ContextLengthError: a text is too long.
        ParallmError: see ``PoolingClient.encode``.
    """
    if _reads_pairs(model.info):
        logits, num_tokens = await _logits(encoders, model, pairs, request_id, truncate)
        if activation == "none" or (activation == "default" and model.info.scores_are_logits):
            return PairScores(values=logits, num_tokens=num_tokens)
        return PairScores(values=[logistic(one) for one in logits], num_tokens=num_tokens)
    if model.info.tasks[0] == "token_embed":
        return await _max_sims(encoders, model, pairs, request_id, truncate)
    return await _cosines(encoders, model, pairs, request_id, truncate)


async def _logits(
    encoders: PoolingClient,
    model: PoolingModel,
    pairs: Pairs,
    request_id: str,
    truncate: int | None,
) -> tuple[list[float], int]:
    num = len(pairs.documents)
    queries = pairs.queries if len(pairs.queries) == num else [pairs.queries[0]] * num
    inputs = await pair_inputs(
        list(zip(queries, pairs.documents, strict=True)),
        model,
        truncate=truncate,
        param=pairs.params[1],
    )
    found = await encoders.encode(model.request(request_id, inputs))
    return [float(one[0]) for one in found], sum(len(one.token_ids) for one in inputs)


async def _cosines(
    encoders: PoolingClient,
    model: PoolingModel,
    pairs: Pairs,
    request_id: str,
    truncate: int | None,
) -> PairScores:
    inputs: list[EncodeInput] = []
    sides = zip((pairs.queries, pairs.documents), pairs.params, ("query", "document"), strict=True)
    for texts, param, side in sides:
        prompt = prompt_of_type(model.info, side)
        inputs += await single_inputs(
            texts, model, "embed", role=Role(prompt=prompt), truncate=truncate, param=param
        )
    found = await encoders.encode(model.request(request_id, inputs))
    vectors = unit_vectors(np.stack(found).astype(np.float64))
    # One query stands beside all documents.
    queries, documents = np.split(vectors, [len(pairs.queries)])
    values = (queries * documents).sum(axis=1).tolist()
    return PairScores(values=values, num_tokens=sum(len(one.token_ids) for one in inputs))


async def _max_sims(
    encoders: PoolingClient,
    model: PoolingModel,
    pairs: Pairs,
    request_id: str,
    truncate: int | None,
) -> PairScores:
    late = model.info.late or LateInteraction()
    first, second = pairs.params
    queries = await query_inputs(pairs.queries, model, truncate=truncate, param=first)
    documents = await document_inputs(pairs.documents, model, truncate=truncate, param=second)
    vectors, _ = await encoded(
        encoders,
        model,
        queries,
        f"{request_id}-queries",
        lambda one, found: side_vectors(one, found, "query", late),
    )
    # One query stands beside all documents, whose results come in their order.
    beside = itertools.cycle(vectors)
    values, _ = await encoded(
        encoders,
        model,
        documents,
        f"{request_id}-documents",
        lambda one, found: max_sim(
            next(beside), side_vectors(one, found, "document", late), is_mean=late.is_mean
        ),
    )
    num_tokens = sum(len(one.token_ids) for one in (*queries, *documents))
    return PairScores(values=values, num_tokens=num_tokens)


def logistic(value: float) -> float:
    """1 / (1 + exp(-value)), which cannot overflow like this."""
    return 0.5 * (1 + math.tanh(value / 2))


def _rank(info: EncoderInfo) -> int:
    """Return the place of a model that can score pairs among those made for that, the best first.

    Cross-encoders, models that compare tokens, models made for vectors, reward models, and models
    that give vectors but were made for something else, such as masked LMs.
    """
    if _reads_pairs(info):
        return 3 if info.is_reward else 0
    return {"token_embed": 1, "embed": 2}.get(info.tasks[0], 4)


def _reads_pairs(info: EncoderInfo) -> bool:
    return info.tasks[0] == "classify" and len(info.labels) == 1


def _embeds(info: EncoderInfo) -> bool:
    return "embed" in info.tasks and not info.labels
