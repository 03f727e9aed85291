"""``POST /v1/embeddings``."""

from __future__ import annotations

from fastapi import Response

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingDep
from mlx_parallm.api.pooling.embeddings.answer import check_dimensions, embeddings_response
from mlx_parallm.api.pooling.embeddings.array_encoding import check_format
from mlx_parallm.api.pooling.embeddings.schema import EmbeddingsRequest
from mlx_parallm.api.pooling.inputs.prompts import named_prompt, prompt_of_type
from mlx_parallm.api.pooling.inputs.request import request_inputs
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo

routes = Routes(POOLING, body_limit=INPUT, short=True)


@routes.post("/v1/embeddings", batchable=True)
async def create_embeddings(body: EmbeddingsRequest, pooling: PoolingDep) -> Response:
    """A vector for each text."""
    model = pooling.client.get(body.model, "embed")
    check_dimensions(body.dimensions, model)
    call = pooling.call(model, body.model, "embd", body.request_id)
    prompt = asked_prompt(body, model.info)
    inputs = await request_inputs(body, model, "embed", prompt=prompt)
    check_format(body, len(inputs))
    return await call.respond(inputs, lambda encoded: embeddings_response(encoded, body))


def asked_prompt(body: EmbeddingsRequest, info: PoolingInfo) -> str:
    """Return the prompt that a request asks for; the model's default where it asks for none.

    Raises:
        InvalidRequestError: the model has none of this name, or the inputs are no texts.
    """
    given = {"prompt": body.prompt, "prompt_name": body.prompt_name, "input_type": body.input_type}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise InvalidRequestError(
            f"Only one of {', '.join(asked)} can be asked for.", param=asked[1]
        )
    is_text = body.messages is None and body.input is not None and isinstance(body.input[0], str)
    if asked and not is_text:
        raise InvalidRequestError(f"{asked[0]} is for texts.", param=asked[0])
    if body.prompt is not None:
        return body.prompt
    if body.input_type is not None:
        return prompt_of_type(info, body.input_type)
    return named_prompt(info, body.prompt_name)
