"""The routes of text-embeddings-inference.

See https://huggingface.github.io/text-embeddings-inference. Errors are in OpenAI's shape, as
everywhere here: clients of TEI show what they hold, and read nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT, SMALL, TOKENIZE
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingCall, PoolingDep, PoolingPrelude
from mlx_parallm.api.pooling.embeddings.answer import check_dimensions, finished
from mlx_parallm.api.pooling.tei.answer import (
    PARAM,
    embed_inputs,
    model_facts,
    predict_inputs,
    predictions,
    similarities,
    sparse_values,
)
from mlx_parallm.api.pooling.tei.schema import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedOptions,
    EmbedRequest,
    PredictRequest,
    SimilarityRequest,
)
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError
from mlx_parallm.types.pooling import Task

routes = Routes(POOLING, body_limit=INPUT)


@routes.get("/info", body_limit=SMALL)
async def info(pooling: PoolingDep, model: str | None = None) -> dict[str, Any]:
    """What TEI tells of an encoder: the one that is named, else the first."""
    if model is None and not pooling.client.models():
        raise NotFoundError("No encoder is served here; see /server_info.")
    return model_facts(pooling.client.get(model, *get_args(Task)))


@routes.post("/embed")
async def embed(body: EmbedRequest, pooling: PoolingDep) -> Response:
    """A vector for each text."""
    model = pooling.client.get(body.model, "embed")
    check_dimensions(body.dimensions, model)
    inputs = await embed_inputs(body.inputs, body, model, "embed")

    def write(encoded: Encoded) -> Response:
        vectors = finished(encoded.results, body.dimensions, normalizes=body.normalize)
        return JSONResponse(vectors.tolist())

    return await _call(pooling, model).respond(inputs, write, param=PARAM)


@routes.post("/embed_all")
async def embed_all(body: EmbedAllRequest, pooling: PoolingDep) -> Response:
    """A vector for each token of each text, as the model has it."""
    model = pooling.client.get(body.model, "token_embed")
    inputs = await embed_inputs(body.inputs, body, model, "token_embed")

    def write(encoded: Encoded) -> Response:
        return JSONResponse([vectors.tolist() for vectors in encoded.results])

    return await _call(pooling, model).respond(inputs, write, param=PARAM)


@routes.post("/embed_sparse")
async def embed_sparse(body: EmbedAllRequest, pooling: PoolingDep) -> Response:
    """Weights of words of the vocabulary for each text: SPLADE's, by a masked LM."""
    model = pooling.client.get(body.model, "sparse")
    inputs = await embed_inputs(body.inputs, body, model, "sparse")
    return await _call(pooling, model).respond(
        inputs, lambda encoded: JSONResponse(encoded.results), reduce=sparse_values
    )


@routes.post("/predict")
async def predict(body: PredictRequest, pooling: PoolingDep) -> Response:
    """The labels of each text or pair of texts, the likeliest first."""
    model = pooling.client.get(body.model, "classify")
    inputs = await predict_inputs(body, model)

    def labels(logits: np.ndarray) -> list[dict[str, Any]]:
        return predictions(logits, model.info, raw_scores=body.raw_scores)

    def write(encoded: Encoded) -> Response:
        _, is_batch = body.inputs
        return JSONResponse(encoded.results if is_batch else encoded.results[0])

    return await _call(pooling, model).respond(inputs, write, reduce=labels)


@routes.post("/similarity")
async def similarity(body: SimilarityRequest, pooling: PoolingDep) -> Response:
    """The cosine of a text's vector with those of others."""
    model = pooling.client.get(body.model, "embed")
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    options = body.parameters or EmbedOptions.model_validate({})
    inputs = await embed_inputs(texts, options, model, "embed")
    return await _call(pooling, model).respond(
        inputs, lambda encoded: JSONResponse(similarities(encoded.results)), param=PARAM
    )


@routes.post("/decode", body_limit=TOKENIZE)
async def decode(body: DecodeRequest, pooling: PoolingDep) -> list[str]:
    """The texts of token ids, by an encoder's tokenizer."""
    model = pooling.client.get(body.model, *get_args(Task))
    is_batch = isinstance(body.ids[0], list)
    ids: Sequence[Sequence[int]] = body.ids if is_batch else [body.ids]  # type: ignore[list-item]

    def decoded() -> list[str]:
        if any(not 0 <= token_id < model.info.vocab_size for text in ids for token_id in text):
            raise InvalidRequestError("ids has an id outside the vocabulary.", param="ids")
        options = {"skip_special_tokens": body.skip_special_tokens}
        return [model.tokenizer.decode(text, **options) for text in ids]

    return await in_thread(decoded)


def _call(pooling: PoolingPrelude, model: PoolingModel) -> PoolingCall:
    return pooling.call(model, None, "tei")
