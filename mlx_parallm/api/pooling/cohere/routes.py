"""``POST /v2/embed``: vectors in Cohere's shapes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import Response

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep, num_tokens
from mlx_parallm.api.pooling.cohere.dialect import COHERE
from mlx_parallm.api.pooling.cohere.schema import FIELDS, EmbedRequest
from mlx_parallm.api.pooling.inputs.encode import Role, prompt_of_type, single_inputs
from mlx_parallm.api.pooling.vectors.arrays import as_bytes, check_dimensions, finished
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput

routes = Routes(POOLING, dialect=COHERE, body_limit=INPUT, in_any_process=True)
SIGNED_TYPES = ("binary", "ubinary")


@routes.post("/v2/embed")
async def embed(body: EmbedRequest, pooling: PoolingDep) -> Response:
    """Return vectors, in one type of numbers or several."""
    call = pooling.open("embd", body.model, "embed")
    with named_by(FIELDS):
        check_dimensions(body.output_dimension, call.model)
        _check_types(body, call.model)
        inputs, param = await _inputs(body, call.model)

    def answer(encoded: Encoded) -> dict[str, Any]:
        vectors = finished(encoded.results, "embed", call.model.info, body.output_dimension)
        return _answer(encoded, body, vectors)

    return await call.respond(inputs, answer, param=param)


async def _inputs(body: EmbedRequest, model: PoolingModel) -> tuple[Sequence[PoolingInput], str]:
    """Return the inputs and the field that they came from."""
    texts, param = body.sources()
    prompt = "" if body.input_type is None else prompt_of_type(model.info, body.input_type)
    reading = body.reading(param, model.info.max_model_len)
    inputs = await single_inputs(texts, model, "embed", reading, role=Role(prompt=prompt))
    longest = max(len(each.token_ids) for each in inputs)
    if body.truncate == "NONE" and body.max_tokens is not None and longest > body.max_tokens:
        raise InvalidRequestError(
            f"An input has {longest} tokens, and max_tokens is {body.max_tokens}.", param=param
        )
    return inputs, param


def _check_types(body: EmbedRequest, model: PoolingModel) -> None:
    dims = body.output_dimension or model.info.dims
    packed = [each for each in body.embedding_types if each in SIGNED_TYPES]
    if packed and dims % 8:
        raise InvalidRequestError(
            f"{packed[0]} needs vectors of a multiple of 8 numbers, and these have {dims}.",
            param="embedding_types",
        )


def _answer(encoded: Encoded, body: EmbedRequest, vectors: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return Cohere's answer."""
    count = num_tokens(encoded.inputs)
    types = dict.fromkeys(body.embedding_types)
    return {
        "id": encoded.call.answer_id,
        "embeddings": {name: [_WRITERS[name](each) for each in vectors] for name in types},
        **({} if body.texts is None else {"texts": body.texts}),
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": count},
            "tokens": {"input_tokens": count},
        },
        "response_type": "embeddings_by_type",
    }


def _int8(vector: np.ndarray) -> np.ndarray:
    """Return a vector with 127 for its largest number, int16; zeros stay."""
    largest = np.abs(vector).max()
    return np.rint(vector * (127 / largest if largest else 0)).astype(np.int16)


def _signs(vector: np.ndarray) -> np.ndarray:
    """Return a bit for each number, 1 if it is positive, eight a byte, the first one highest."""
    return np.packbits(vector > 0).astype(np.int16)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(as_bytes(vector)).decode()


_WRITERS: Mapping[str, Callable[[np.ndarray], Any]] = {
    "float": np.ndarray.tolist,
    "int8": lambda vector: _int8(vector).tolist(),
    "uint8": lambda vector: (_int8(vector) + 128).tolist(),
    "binary": lambda vector: (_signs(vector) - 128).tolist(),
    "ubinary": lambda vector: _signs(vector).tolist(),
    "base64": _base64,
}
