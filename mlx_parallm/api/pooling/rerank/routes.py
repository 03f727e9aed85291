"""``POST /v1/rerank``, and as ``/rerank`` and ``/v2/rerank``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingCall, PoolingDep, prompt_usage
from mlx_parallm.api.pooling.inputs.encode import shortened_texts
from mlx_parallm.api.pooling.rerank.schema import RerankRequest
from mlx_parallm.api.pooling.score.pairs import (
    Activation,
    Pairs,
    PairScores,
    score_pairs,
    scoring_model,
)
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.types.errors import InvalidRequestError

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
