"""Scores of texts for queries, by a cross-encoder or by vectors of texts or of their tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mlx_parallm.api.pooling.answer import num_tokens
from mlx_parallm.api.pooling.encoded import ModelCall
from mlx_parallm.api.pooling.inputs.encode import (
    Reading,
    Role,
    pair_inputs,
    prompt_of_type,
    single_inputs,
)
from mlx_parallm.api.pooling.scores.schema import ScoreRequest
from mlx_parallm.api.pooling.vectors.arrays import unit_vectors
from mlx_parallm.api.pooling.vectors.late_interaction import (
    Side,
    max_sim,
    side_inputs,
    side_vectors,
)
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import LateInteraction, PoolingInfo, PoolingInput

#: The activation of a cross-encoder's logit: that of its files, the logistic function, none.
Activation = Literal["default", "sigmoid", "none"]


SIDES: tuple[Side, Side] = ("query", "document")
#: NAMES: vLLM's fields for the two sides of pairs.
NAMES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Texts to be compared.

    Attributes:
        queries: one for all documents, or as many as there are.
        documents: at least one.
        params: the body's fields of the two.
        truncate: see ``Reading``.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    params: tuple[str, str]
    truncate: int | None

    def reading(self, side: Side) -> Reading:
        """Return how the texts of a side are read."""
        return Reading(truncate=self.truncate, param=self.params[SIDES.index(side)])


@dataclass(frozen=True, slots=True)
class PairScores:
    """A score for each document, and the tokens that were read for them."""

    values: list[float]
    num_tokens: int


def pairs_of(body: ScoreRequest) -> Pairs:
    """Return the pairs of a body of vLLM's.

    Raises:
        InvalidRequestError: not exactly two sides are there, or their lengths do not fit.
    """
    present = {name for pair in NAMES for name in pair} & body.model_fields_set
    names = next((pair for pair in NAMES if set(pair) == present), None)
    if names is None:
        known = ", ".join(f"{first} and {second}" for first, second in NAMES)
        raise InvalidRequestError(
            f"Give {known}, or query and items.", param=min(present, default="text_1")
        )
    queries, documents = getattr(body, names[0]), getattr(body, names[1])
    if not all(isinstance(text, str) for text in documents):
        raise InvalidRequestError(f"{names[1]} must be texts.", param=names[1])
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            f"{names[0]} has {len(queries)} texts: it needs one, or as many as {names[1]}.",
            param=names[0],
        )
    return Pairs(queries, documents, names, body.truncate_prompt_tokens)


def scoring_model(client: PoolingClient, name: str | None) -> PoolingModel:
    """Return the model of this name, else the one most suited to ranking; see ``_rank``.

    Raises:
        ModelNotFoundError: no model has the name.
        InvalidRequestError: it cannot score pairs.
    """
    if name is not None:
        named = client.get(name, "classify", "embed")
        if not (_reads_pairs(named.info) or _embeds(named.info)):
            raise InvalidRequestError(
                f"{name} has {len(named.info.labels)} labels; a model that scores pairs has one "
                "label, or gives vectors.",
                param="model",
            )
        return named
    infos = ((model, model.info) for model in client.models())
    able = [model for model, info in infos if _reads_pairs(info) or _embeds(info)]
    if not able:
        raise InvalidRequestError("No model that can score pairs is served here.", param="model")
    # ``min`` chooses the first of equals.
    return min(able, key=lambda model: _rank(model.info))


async def score_pairs(
    call: ModelCall, pairs: Pairs, activation: Activation = "default"
) -> PairScores:
    """Return the score of each document.

    A cross-encoder reads query and document together, as sentence-transformers' ``CrossEncoder``
    does. An embedder's score is the cosine of their vectors, and a late-interaction model's is
    MaxSim; these two put the model's own prompts before both.

    Args:
        call: a call of a model of ``scoring_model``.
        pairs: the texts to compare.
        activation: a cross-encoder's.

    Raises:
        InvalidRequestError, ContextLengthError: a text is too long.
        ParallmError: see ``PoolingClient.encode``.
    """
    info = call.model.info
    if not _reads_pairs(info):
        compare = _max_sims if info.tasks[0] == "token_embed" else _cosines
        return await compare(call, pairs)
    scores = await _logits(call, pairs)
    if activation == "none" or (activation == "default" and info.scores_are_logits):
        return scores
    return replace(scores, values=[logistic(logit) for logit in scores.values])


async def _logits(call: ModelCall, pairs: Pairs) -> PairScores:
    count = len(pairs.documents)
    queries = pairs.queries if len(pairs.queries) == count else [pairs.queries[0]] * count
    inputs = await pair_inputs(
        list(zip(queries, pairs.documents, strict=True)), call.model, pairs.reading("document")
    )
    logits = await call.encode(inputs)
    return PairScores([float(row[0]) for row in logits], num_tokens(inputs))


async def _cosines(call: ModelCall, pairs: Pairs) -> PairScores:
    inputs: list[PoolingInput] = []
    for side, texts in zip(SIDES, (pairs.queries, pairs.documents), strict=True):
        role = Role(prompt=prompt_of_type(call.model.info, side))
        inputs += await single_inputs(texts, call.model, "embed", pairs.reading(side), role=role)
    vectors = unit_vectors(np.stack(await call.encode(inputs)).astype(np.float64))
    # NumPy repeats a single query for all documents.
    queries, documents = np.split(vectors, [len(pairs.queries)])
    values = (queries * documents).sum(axis=1).tolist()
    return PairScores(values, num_tokens(inputs))


async def _max_sims(call: ModelCall, pairs: Pairs) -> PairScores:
    model = call.model
    late = model.info.late or LateInteraction()
    queries = await side_inputs(pairs.queries, model, "query", pairs.reading("query"))
    documents = await side_inputs(pairs.documents, model, "document", pairs.reading("document"))
    vectors, _ = await call.written(
        queries, lambda query, result: side_vectors(query, result, "query", late), part="queries"
    )
    # A single query is compared with all documents, whose results come in their order.
    beside = itertools.cycle(vectors)

    def score(document: PoolingInput, result: np.ndarray) -> float:
        compared = side_vectors(document, result, "document", late)
        return max_sim(next(beside), compared, is_mean=late.is_mean)

    values, _ = await call.written(documents, score, part="documents")
    return PairScores(values, num_tokens((*queries, *documents)))


def logistic(value: float) -> float:
    """Return 1 / (1 + exp(-value)), in a form that cannot overflow."""
    return 0.5 * (1 + math.tanh(value / 2))


def _rank(info: PoolingInfo) -> int:
    """Return a rank that is smaller for models more suited to scoring pairs.

    The order is: cross-encoders, late-interaction models, embedders, reward models, and models with
    another main task that give vectors too, such as masked LMs.
    """
    if _reads_pairs(info):
        return 3 if info.is_reward else 0
    return {"token_embed": 1, "embed": 2}.get(info.tasks[0], 4)


def _reads_pairs(info: PoolingInfo) -> bool:
    return info.tasks[0] == "classify" and len(info.labels) == 1


def _embeds(info: PoolingInfo) -> bool:
    return "embed" in info.tasks and not info.labels
