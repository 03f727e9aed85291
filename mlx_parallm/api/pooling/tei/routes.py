"""The routes of text-embeddings-inference.

See https://huggingface.github.io/text-embeddings-inference. Errors are in OpenAI's shape, as
everywhere here: clients of TEI show what they hold, and read nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT, SMALL, TOKENIZE
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, Encoding, encoded_response
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
from mlx_parallm.types.pooling import EncodeInput, Task

routes = Routes(POOLING, body_limit=INPUT)


@routes.get("/info", body_limit=SMALL)
async def info(engine: EngineDep, model: str | None = None) -> dict[str, Any]:
    """What TEI tells of an encoder: the one that is named, else the first."""
    if model is None and not engine.encoders.models():
        raise NotFoundError("No encoder is served here; see /server_info.")
    return model_facts(engine.encoders.get(model, *get_args(Task)))


@routes.post("/embed")
async def embed(body: EmbedRequest, request: Request, engine: EngineDep) -> Response:
    """A vector for each text."""
    model = engine.encoders.get(body.model, "embed")
    check_dimensions(body.dimensions, model)
    asked = _asked(request, model, await embed_inputs(body.inputs, body, model, "embed"))

    def write(found: Encoded) -> Response:
        vectors = finished(found.results, body.dimensions, normalizes=body.normalize)
        return JSONResponse(vectors.tolist())

    return await encoded_response(request, engine, asked, write)


@routes.post("/embed_all")
async def embed_all(body: EmbedAllRequest, request: Request, engine: EngineDep) -> Response:
    """A vector for each token of each text, as the model has it."""
    model = engine.encoders.get(body.model, "token_embed")
    asked = _asked(request, model, await embed_inputs(body.inputs, body, model, "token_embed"))
    return await encoded_response(
        request, engine, asked, lambda found: JSONResponse([one.tolist() for one in found.results])
    )


@routes.post("/embed_sparse")
async def embed_sparse(body: EmbedAllRequest, request: Request, engine: EngineDep) -> Response:
    """Weights of words of the vocabulary for each text: SPLADE's, by a masked LM."""
    model = engine.encoders.get(body.model, "sparse")
    asked = _asked(request, model, await embed_inputs(body.inputs, body, model, "sparse"))
    return await encoded_response(
        request, engine, asked, lambda found: JSONResponse(found.results), reduce=sparse_values
    )


@routes.post("/predict")
async def predict(body: PredictRequest, request: Request, engine: EngineDep) -> Response:
    """The labels of each text or pair of texts, the likeliest first."""
    model = engine.encoders.get(body.model, "classify")
    asked = _asked(request, model, await predict_inputs(body, model))

    def labels(logits: np.ndarray) -> list[dict[str, Any]]:
        return predictions(logits, model.info, raw_scores=body.raw_scores)

    def write(found: Encoded) -> Response:
        _, is_batch = body.inputs
        return JSONResponse(found.results if is_batch else found.results[0])

    return await encoded_response(request, engine, asked, write, reduce=labels)


@routes.post("/similarity")
async def similarity(body: SimilarityRequest, request: Request, engine: EngineDep) -> Response:
    """The cosine of a text's vector with those of others."""
    model = engine.encoders.get(body.model, "embed")
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    options = body.parameters or EmbedOptions.model_validate({})
    asked = _asked(request, model, await embed_inputs(texts, options, model, "embed"))
    return await encoded_response(
        request, engine, asked, lambda found: JSONResponse(similarities(found.results))
    )


@routes.post("/decode", body_limit=TOKENIZE)
async def decode(body: DecodeRequest, engine: EngineDep) -> list[str]:
    """The texts of token ids, by an encoder's tokenizer."""
    model = engine.encoders.get(body.model, *get_args(Task))
    is_batch = isinstance(body.ids[0], list)
    ids: Sequence[Sequence[int]] = body.ids if is_batch else [body.ids]  # type: ignore[list-item]

    def decoded() -> list[str]:
        if any(not 0 <= one < model.info.vocab_size for text in ids for one in text):
            raise InvalidRequestError("ids has an id outside the vocabulary.", param="ids")
        options = {"skip_special_tokens": body.skip_special_tokens}
        return [model.tokenizer.decode(one, **options) for one in ids]

    return await in_thread(decoded)


def _asked(request: Request, model: PoolingModel, inputs: tuple[EncodeInput, ...]) -> Encoding:
    return Encoding(
        model=model,
        name=model.names[0],
        inputs=inputs,
        request_id=f"tei-{request.state.answer_id}",
        param=PARAM,
    )
