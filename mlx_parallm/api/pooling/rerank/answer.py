"""Ranked documents as Jina, Cohere, vLLM and TEI write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_parallm.api.pooling.answer import PoolingCall, prompt_usage
from mlx_parallm.api.pooling.rerank.schema import RerankRequest
from mlx_parallm.api.pooling.score.pairs import PairScores


def ranked(values: Sequence[float]) -> list[int]:
    """Places of the values, the highest first; of equal ones the first."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))


def rerank_answer(
    scores: PairScores, body: RerankRequest, documents: Sequence[str], call: PoolingCall
) -> dict[str, Any]:
    """Return the object of Jina, Cohere and vLLM."""
    results: list[dict[str, Any]] = []
    for place in ranked(scores.values)[: body.top_n or None]:
        result: dict[str, Any] = {"index": place, "relevance_score": scores.values[place]}
        if body.return_documents:
            result["document"] = {"text": documents[place]}
        results.append(result)
    usage = prompt_usage(scores.num_tokens)
    return {"id": call.answer_id, "model": call.name, "usage": usage, "results": results}


def tei_answer(
    scores: PairScores, body: RerankRequest, documents: Sequence[str]
) -> list[dict[str, Any]]:
    """Return TEI's list."""
    return [
        {"index": place, "score": scores.values[place]}
        | ({"text": documents[place]} if body.return_text else {})
        for place in ranked(scores.values)
    ]
