"""The routes of text-embeddings-inference.

See https://huggingface.github.io/text-embeddings-inference. Errors have OpenAI's shape, as
everywhere here: clients of TEI show an error's content and do not read its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from fastapi import Response

from mlx_parallm.api.http.declared import INPUT, SMALL, TOKENIZE
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep
from mlx_parallm.api.pooling.inputs.request import prompted_inputs
from mlx_parallm.api.pooling.tei.answer import (
    PARAM,
    model_facts,
    predict_inputs,
    predictions,
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
from mlx_parallm.api.pooling.vectors.arrays import check_dimensions, finished, similarities
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError
from mlx_parallm.types.pooling import PoolingInput, Task

routes = Routes(POOLING, body_limit=INPUT, in_any_process=True)


@routes.get("/info", body_limit=SMALL)
async def info(pooling: PoolingDep, model: str | None = None) -> dict[str, Any]:
    """Return TEI's facts about a pooling model: the one that is named, else the first."""
    if model is None and not pooling.client.models():
        raise NotFoundError("No pooling model is served here; see /server_info.")
    return model_facts(pooling.client.get(model, *get_args(Task)))


@routes.post("/embed")
async def embed(body: EmbedRequest, pooling: PoolingDep) -> Response:
    """Return a vector for each text."""
    call = pooling.open("tei", body.model, "embed")
    check_dimensions(body.dimensions, call.model)
    inputs = await _inputs(body, body.inputs, call.model, "embed")

    def answer(encoded: Encoded) -> list[Any]:
        options = (body.dimensions, body.normalize)
        vectors = finished(encoded.results, "embed", call.model.info, *options)
        return [vector.tolist() for vector in vectors]

    return await call.respond(inputs, answer, param=PARAM)


@routes.post("/embed_all")
async def embed_all(body: EmbedAllRequest, pooling: PoolingDep) -> Response:
    """Return a vector for each token of each text, as the model computes it."""
    call = pooling.open("tei", body.model, "token_embed")
    inputs = await _inputs(body, body.inputs, call.model, "token_embed")
    return await call.respond(
        inputs, lambda encoded: [vectors.tolist() for vectors in encoded.results], param=PARAM
    )


@routes.post("/embed_sparse")
async def embed_sparse(body: EmbedAllRequest, pooling: PoolingDep) -> Response:
    """Return weights of tokens of the vocabulary for each text: SPLADE, by a masked LM."""
    call = pooling.open("tei", body.model, "sparse")
    inputs = await _inputs(body, body.inputs, call.model, "sparse")
    return await call.respond(inputs, lambda encoded: encoded.results, reduce=sparse_values)


@routes.post("/predict")
async def predict(body: PredictRequest, pooling: PoolingDep) -> Response:
    """Return the labels of each text or pair of texts, the likeliest first."""
    call = pooling.open("tei", body.model, "classify")
    inputs = await predict_inputs(body, call.model)
    _, is_batch = body.inputs
    return await call.respond(
        inputs,
        lambda encoded: encoded.results if is_batch else encoded.results[0],
        reduce=lambda logits: predictions(logits, call.model.info, raw_scores=body.raw_scores),
    )


@routes.post("/similarity")
async def similarity(body: SimilarityRequest, pooling: PoolingDep) -> Response:
    """Return the cosine of a text's vector with the vector of each other text."""
    call = pooling.open("tei", body.model, "embed")
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    options = body.parameters or EmbedOptions.model_validate({})
    inputs = await _inputs(options, texts, call.model, "embed")
    return await call.respond(inputs, lambda encoded: similarities(encoded.results), param=PARAM)


@routes.post("/decode", body_limit=TOKENIZE)
async def decode(body: DecodeRequest, pooling: PoolingDep) -> list[str]:
    """Return the texts of token ids, by a pooling model's tokenizer."""
    model = pooling.client.get(body.model, *get_args(Task))
    ids: Any = body.ids if isinstance(body.ids[0], list) else [body.ids]

    def decoded() -> list[str]:
        if any(not 0 <= token_id < model.info.vocab_size for text in ids for token_id in text):
            raise InvalidRequestError("ids has an id outside the vocabulary.", param="ids")
        skips = body.skip_special_tokens
        return [model.tokenizer.decode(text, skip_special_tokens=skips) for text in ids]

    return await in_thread(decoded)


async def _inputs(
    options: EmbedOptions, sources: Sequence[Any], model: PoolingModel, task: Task
) -> tuple[PoolingInput, ...]:
    reading = options.reading(PARAM)
    return await prompted_inputs(sources, model, task, reading, options.prompt_name)
