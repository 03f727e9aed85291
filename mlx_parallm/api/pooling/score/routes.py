"""``POST /v1/score`` in vLLM's and SGLang's shapes, and vLLM's ``/generative_scoring``."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.score.labels import (
    FIELDS,
    LabelScores,
    classifier_scores,
    encode_prompts,
    generator_scores,
    label_model,
    label_question,
)
from mlx_parallm.api.pooling.score.pairs import pairs_of, score_pairs, scoring_model
from mlx_parallm.api.pooling.score.schema import ScoreRequest
from mlx_parallm.api.turns.generation import named_by, unless_disconnected
from mlx_parallm.api.turns.openai import usage_body
from mlx_parallm.api.turns.prelude import Prelude, PreludeDep
from mlx_parallm.api.turns.samples import Usage
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest

routes = Routes(POOLING, body_limit=INPUT, short=True)


@routes.post("/v1/score", batchable=True)
async def score(
    body: ScoreRequest,
    request: Request,
    prelude: PreludeDep,
) -> Response:
    """How well pairs of texts fit, or how probable labels are after a query and each item."""

    async def work() -> Response:
        if body.query is None:
            return await _pairs(body, prelude)
        name, found = await _labels(body, prelude, softmax=False, joins_texts=True)
        usage = usage_body(found.usage)
        return JSONResponse(
            {"object": "scoring", "model": name, "scores": found.values, "usage": usage}
        )

    return await unless_disconnected(request, work())


@routes.post("/v1/generative_scoring")
async def generative_scoring(
    body: ScoreRequest,
    request: Request,
    prelude: PreludeDep,
) -> Response:
    """How probable the first label is after a query and each item."""

    async def work() -> Response:
        name, found = await _labels(body, prelude, softmax=True, joins_texts=False)
        answer_id = f"generative-scoring-{body.request_id or prelude.answer_id}"
        values = [one[0] for one in found.values]
        return JSONResponse(_answer(values, found.usage, answer_id=answer_id, model=name))

    return await unless_disconnected(request, work())


async def _pairs(body: ScoreRequest, prelude: Prelude) -> Response:
    engine = prelude.engine
    pairs = pairs_of(body)
    if body.truncate_prompt_tokens is not None and body.truncation_side == "left":
        raise InvalidRequestError(
            "Of a pair the second text is cut at its end.", param="truncation_side"
        )
    model = scoring_model(engine.encoders, body.model)
    scores = await score_pairs(
        engine.encoders,
        model,
        pairs,
        request_id=f"score-{prelude.answer_id}",
        activation="default" if body.use_activation else "none",
        truncate=body.truncate_prompt_tokens,
    )
    answer = _answer(
        scores.values,
        Usage(prompt_tokens=scores.num_tokens),
        answer_id=f"score-{body.request_id or prelude.answer_id}",
        model=body.model or model.names[0],
    )
    # Thousands of scores take long to write.
    return await asyncio.to_thread(JSONResponse, answer)


async def _labels(
    body: ScoreRequest,
    prelude: Prelude,
    *,
    softmax: bool,
    joins_texts: bool,
) -> tuple[str, LabelScores]:
    """The name of the model, and its scores; ``softmax`` is what the route does by default."""
    asked = label_question(body)
    apply_softmax = softmax if body.apply_softmax is None else body.apply_softmax
    model = label_model(prelude.engine, body.model)
    name, request_id = body.model or model.names[0], f"score-{prelude.answer_id}"
    if isinstance(model, PoolingModel):
        return name, await classifier_scores(
            prelude.engine, model, asked, request_id=request_id, apply_softmax=apply_softmax
        )
    if not asked.labels:
        raise InvalidRequestError("label_token_ids is missing.", param="label_token_ids")
    if asked.truncate is not None:
        raise InvalidRequestError(
            f"{name} generates: its prompts are not cut.", param="truncate_prompt_tokens"
        )
    admitted = await prelude.admit_to(model, name, num_prompts=len(asked.items), fields=FIELDS)
    with named_by(FIELDS):
        prompts = await encode_prompts(asked, model.tokenizer, joins_texts=joins_texts)
    template = GenerateRequest(
        request_id=request_id,
        model=model.names[0],
        prompt_ids=prompts[0],
        priority=body.priority or 0,
        client=prelude.client,
        cache_salt=body.cache_salt,
    )
    return name, await generator_scores(
        admitted, prompts, asked.labels, template, apply_softmax=apply_softmax
    )


def _answer(values: list[float], usage: Usage, *, answer_id: str, model: str) -> dict[str, Any]:
    """VLLM's list of scores."""
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
