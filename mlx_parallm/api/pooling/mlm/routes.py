"""``POST /v1/mlm``: predictions of a masked LM for masks, or scores of whole texts."""

from __future__ import annotations

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingCall, PoolingDep
from mlx_parallm.api.pooling.mlm.answer import MaskQuestion, mlm_answer
from mlx_parallm.api.pooling.mlm.schema import MlmRequest
from mlx_parallm.api.pooling.mlm.text_scores import masked_one_by_one, scored_texts, text_scores
from mlx_parallm.api.turns.generation import unless_disconnected

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


@routes.post("/v1/mlm")
async def predict_masks(body: MlmRequest, pooling: PoolingDep) -> Response:
    """Return the likeliest tokens at each mask, scores of words there, or of whole texts."""
    body.check()
    call = pooling.open("mlm", body.model, "mlm")
    answer = _score if body.pseudo_log_likelihood else _fill
    return await unless_disconnected(pooling.request, answer(body, call))


async def _fill(body: MlmRequest, call: PoolingCall) -> Response:
    question = await MaskQuestion.of(body, call.model)
    answers, hits = await call.written(await question.inputs(), question.answer)
    texts = [{**text, "cache_hit": hit} for text, hit in zip(answers, hits, strict=True)]
    return JSONResponse(mlm_answer(texts, body, call.name, question.words.warnings))


async def _score(body: MlmRequest, call: PoolingCall) -> Response:
    texts = await scored_texts(body.sources, call.model, body.source_reading)
    logprobs, hits = await call.written(
        masked_one_by_one(texts, call.model), lambda _, result: float(result[0, 0])
    )
    return JSONResponse(mlm_answer(text_scores(texts, logprobs, hits), body, call.name, ()))
