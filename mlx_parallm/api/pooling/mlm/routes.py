"""``POST /v1/mlm``: predictions of a masked LM for masks, or scores of whole texts.

A text's score is its pseudo-log-likelihood: each token is masked in turn, and the log-probabilities
of the tokens that were there are added up (Salazar et al., 2020,
https://arxiv.org/abs/1910.14659).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingCall, PoolingDep
from mlx_parallm.api.pooling.inputs.encode import Reading, single_inputs
from mlx_parallm.api.pooling.mlm.answer import MaskQuestion, mlm_answer
from mlx_parallm.api.pooling.mlm.inputs import mask_id
from mlx_parallm.api.pooling.mlm.schema import MlmRequest
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput

# MAX_SCORED_TOKENS: the model reads a text once for each of its tokens.
MAX_SCORED_TOKENS = 8192
routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


async def scored_texts(
    sources: Sequence[Any], model: PoolingModel, reading: Reading
) -> list[PoolingInput]:
    """Return texts whose places are all their tokens but the special ones.

    Raises:
        InvalidRequestError: they have too many tokens together; see also ``single_inputs``.
    """
    special = model.tokenizer.special_ids
    texts = [
        replace(
            text,
            places=tuple(
                place for place, token in enumerate(text.token_ids) if token not in special
            ),
        )
        for text in await single_inputs(sources, model, "mlm", reading)
    ]
    if sum(len(text.places) for text in texts) > MAX_SCORED_TOKENS:
        raise InvalidRequestError(
            f"pseudo_log_likelihood scores at most {MAX_SCORED_TOKENS} tokens together; send "
            "fewer texts.",
            param=reading.param,
        )
    return texts


def masked_one_by_one(texts: Sequence[PoolingInput], model: PoolingModel) -> list[PoolingInput]:
    """Return an input for each place of each text, with a mask at that place."""
    mask = mask_id(model)
    return [
        PoolingInput(
            (*text.token_ids[:place], mask, *text.token_ids[place + 1 :]),
            "mlm_logprobs",
            places=(place,),
            candidates=(text.token_ids[place],),
        )
        for text in texts
        for place in text.places
    ]


def text_scores(
    texts: Sequence[PoolingInput], logprobs: Sequence[float], hits: Sequence[bool]
) -> list[dict[str, Any]]:
    """Return the answer about each text.

    Args:
        texts: the texts whose tokens were masked.
        logprobs: one for each masked token, in the order of the texts.
        hits: for each of these, True if it came from the cache.
    """
    entries: list[dict[str, Any]] = []
    begin = 0
    for text in texts:
        own = slice(begin, begin + len(text.places))
        begin = own.stop
        entries.append(
            {
                "num_tokens": len(text.token_ids),
                "pseudo_log_likelihood": math.fsum(logprobs[own]),
                "positions": list(text.places),
                "tokens": [text.token_ids[place] for place in text.places],
                "logprobs": list(logprobs[own]),
                "cache_hit": bool(text.places) and all(hits[own]),
            }
        )
    return entries


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
