"""``POST /v1/mlm``: what a masked LM says of masks, or of whole texts."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.encoded import encoded
from mlx_parallm.api.pooling.mlm.answer import MaskQuestion, mlm_answer
from mlx_parallm.api.pooling.mlm.schema import MlmRequest
from mlx_parallm.api.pooling.mlm.text_scores import masked_one_by_one, scored_texts, text_scores
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient

routes = Routes(POOLING, body_limit=INPUT, short=True)


@routes.post("/v1/mlm")
async def predict_masks(body: MlmRequest, request: Request, engine: EngineDep) -> Response:
    """The likeliest tokens at each mask, the scores of given words, or those of whole texts."""
    body.check()
    model = engine.encoders.get(body.model, "mlm")
    answer = _score if body.pseudo_log_likelihood else _fill
    return await unless_disconnected(
        request, answer(body, model, engine, f"mlm-{request.state.answer_id}")
    )


async def _fill(
    body: MlmRequest, model: PoolingModel, engine: EngineClient, request_id: str
) -> Response:
    question = await MaskQuestion.of(body, model)
    inputs = await question.inputs()
    told, hits = await encoded(engine.encoders, model, inputs, request_id, question.answer)
    texts = [{**one, "cache_hit": hit} for one, hit in zip(told, hits, strict=True)]
    name = body.model or model.names[0]
    return JSONResponse(mlm_answer(texts, body, name, question.words.warnings))


async def _score(
    body: MlmRequest, model: PoolingModel, engine: EngineClient, request_id: str
) -> Response:
    texts = await scored_texts(
        body.given,
        model,
        truncate=body.truncate_prompt_tokens,
        from_left=body.truncation_side == "left",
        param=body.given_as,
    )
    inputs = masked_one_by_one(texts, model)
    logprobs, hits = await encoded(
        engine.encoders, model, inputs, request_id, lambda _, result: float(result[0, 0])
    )
    name = body.model or model.names[0]
    return JSONResponse(mlm_answer(text_scores(texts, logprobs, hits), body, name, ()))
