"""Ranked documents as Jina, Cohere, vLLM and TEI write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_parallm.api.pooling.answer import PoolingCall, prompt_usage
from mlx_parallm.api.pooling.rerank.schema import RerankRequest
from mlx_parallm.api.pooling.score.pairs import PairScores


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
