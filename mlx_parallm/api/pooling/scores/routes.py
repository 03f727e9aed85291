"""``POST /v1/rerank`` (Jina, Cohere, vLLM, TEI), ``/v1/score`` and ``/generative_scoring``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingCall, PoolingDep, PoolingPrelude, prompt_usage
from mlx_parallm.api.pooling.inputs.encode import shortened_texts
from mlx_parallm.api.pooling.scores.labels import (
    FIELDS,
    LabelScores,
    classifier_scores,
    encode_prompts,
    generator_scores,
    label_parts,
)
from mlx_parallm.api.pooling.scores.pairs import (
    Activation,
    Pairs,
    PairScores,
    pairs_of,
    score_pairs,
    scoring_model,
)
from mlx_parallm.api.pooling.scores.schema import RerankRequest, ScoreRequest
from mlx_parallm.api.turns.generation import named_by, unless_disconnected
from mlx_parallm.api.turns.prelude import Prelude, PreludeDep, encoder_meant, generator
from mlx_parallm.api.turns.samples import Usage, usage_body
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


@routes.post("/v2/rerank", short=False)
@routes.post("/v1/rerank", batchable=True)
async def rerank(body: RerankRequest, pooling: PoolingDep) -> Response:
    """Sort documents by how well they fit a query."""
    documents = body.passages()
    if body.truncation_side == "left":
        raise InvalidRequestError(
            "truncation_side must be right: the document of a pair is cut at its end.",
            param="truncation_side",
        )
    model = scoring_model(pooling.client, body.model)
    call = pooling.call(model, body.model, "rerank", body.request_id)

    async def work() -> Response:
        most = body.max_tokens_per_doc
        read = await shortened_texts(documents, model, most) if most else documents
        names = ("query", "texts" if body.is_tei else "documents")
        truncate = -1 if body.truncate else body.truncate_prompt_tokens
        pairs = Pairs([body.query], read, names, truncate)
        scores = await score_pairs(call, pairs, _activation(body))

        def write() -> Response:
            answer = tei_answer if body.is_tei else rerank_answer
            return JSONResponse(answer(scores, body, documents, call))

        # Thousands of documents take long to write.
        return await asyncio.to_thread(write)

    return await unless_disconnected(pooling.request, work())


def _activation(body: RerankRequest) -> Activation:
    if body.raw_scores or not body.use_activation:
        return "none"
    # TEI ignores the activation in the model's files.
    return "sigmoid" if body.is_tei else "default"


def ranked(values: Sequence[float]) -> list[int]:
    """Return the places of the values, the highest value first; equal values keep their order."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))


def rerank_answer(
    scores: PairScores, body: RerankRequest, documents: Sequence[str], call: PoolingCall
) -> dict[str, Any]:
    """Return the object of Jina, Cohere and vLLM."""
    results = [
        {"index": place, "relevance_score": scores.values[place]}
        | ({"document": {"text": documents[place]}} if body.return_documents else {})
        for place in ranked(scores.values)[: body.top_n or None]
    ]
    usage = prompt_usage(scores.num_tokens)
    return {"id": call.answer_id, "model": call.name, "usage": usage, "results": results}


def tei_answer(
    scores: PairScores, body: RerankRequest, documents: Sequence[str], _: PoolingCall
) -> list[dict[str, Any]]:
    """Return TEI's list."""
    return [
        {"index": place, "score": scores.values[place]}
        | ({"text": documents[place]} if body.return_text else {})
        for place in ranked(scores.values)
    ]


@routes.post("/v1/score", batchable=True)
async def score(body: ScoreRequest, prelude: PreludeDep, pooling: PoolingDep) -> Response:
    """Score pairs of texts, or the probability of labels after a query and each item."""

    async def work() -> Response:
        if body.query is None:
            return await _pairs(body, pooling)
        name, scores = await _labels(body, prelude, pooling, softmax=False, joins_texts=True)
        usage = usage_body(scores.usage)
        return JSONResponse(
            {"object": "scoring", "model": name, "scores": scores.values, "usage": usage}
        )

    return await unless_disconnected(pooling.request, work())


@routes.post("/v1/generative_scoring")
async def generative_scoring(
    body: ScoreRequest, prelude: PreludeDep, pooling: PoolingDep
) -> Response:
    """Return the probability of the first label after a query and each item."""

    async def work() -> Response:
        name, scores = await _labels(body, prelude, pooling, softmax=True, joins_texts=False)
        answer_id = f"generative-scoring-{body.request_id or prelude.answer_id}"
        values = [row[0] for row in scores.values]
        return JSONResponse(_answer(values, scores.usage, answer_id=answer_id, model=name))

    return await unless_disconnected(pooling.request, work())


async def _pairs(body: ScoreRequest, pooling: PoolingPrelude) -> Response:
    pairs = pairs_of(body)
    if body.truncate_prompt_tokens is not None and body.truncation_side == "left":
        raise InvalidRequestError(
            "truncation_side must be right: the second text of a pair is cut at its end.",
            param="truncation_side",
        )
    model = scoring_model(pooling.client, body.model)
    call = pooling.call(model, body.model, "score", body.request_id)
    scores = await score_pairs(call, pairs, "default" if body.use_activation else "none")
    usage = Usage(prompt_tokens=scores.num_tokens)
    answer = _answer(scores.values, usage, answer_id=call.answer_id, model=call.name)
    # Thousands of scores take long to write.
    return await asyncio.to_thread(JSONResponse, answer)


async def _labels(
    body: ScoreRequest,
    prelude: Prelude,
    pooling: PoolingPrelude,
    *,
    softmax: bool,
    joins_texts: bool,
) -> tuple[str, LabelScores]:
    """Return the name of the model, and its scores.

    Args:
        body: the body, with query and items.
        prelude: used if the model generates.
        pooling: used if it is a classifier.
        softmax: the route's default.
        joins_texts: see ``encode_prompts``.
    """
    parts = label_parts(body)
    apply_softmax = softmax if body.apply_softmax is None else body.apply_softmax
    classifier = encoder_meant(prelude.engine, body.model, "classify")
    if classifier is not None:
        call = pooling.call(classifier, body.model, "score")
        scores = await classifier_scores(call, body, parts, apply_softmax=apply_softmax)
        return call.name, scores
    name, model = generator(prelude.engine, body.model)
    _check_for_generator(body, name)
    admitted = await prelude.admit_to(model, name, num_prompts=len(parts), fields=FIELDS)
    with named_by(FIELDS):
        prompts = await encode_prompts(
            parts,
            model.tokenizer,
            joins_texts=joins_texts,
            add_special_tokens=body.add_special_tokens,
        )
    template = GenerateRequest(
        request_id=f"score-{prelude.answer_id}",
        model=model.names[0],
        prompt_ids=prompts[0],
        priority=body.priority or 0,
        client=prelude.client,
        cache_salt=body.cache_salt,
    )
    return name, await generator_scores(
        admitted, prompts, body.label_token_ids, template, apply_softmax=apply_softmax
    )


def _check_for_generator(body: ScoreRequest, name: str) -> None:
    """Refuse a body that lacks labels, or has fields that no generating model supports."""
    if not body.label_token_ids:
        raise InvalidRequestError("label_token_ids is missing.", param="label_token_ids")
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError(
            f"{name} generates, and its prompts cannot be truncated.",
            param="truncate_prompt_tokens",
        )


def _answer(values: list[float], usage: Usage, *, answer_id: str, model: str) -> dict[str, Any]:
    """Return vLLM's list of scores."""
    return {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            {"index": place, "object": "score", "score": value}
            for place, value in enumerate(values)
        ],
        "usage": usage_body(usage),
    }
