"""``POST /v1/embeddings``."""

from __future__ import annotations

from fastapi import Response
from pydantic import AliasChoices, Field, StrictStr

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingDep
from mlx_parallm.api.pooling.inputs.encode import named_prompt, prompt_of_type
from mlx_parallm.api.pooling.inputs.request import request_inputs
from mlx_parallm.api.pooling.inputs.schema import PromptName
from mlx_parallm.api.pooling.vectors.arrays import (
    BYTES,
    ArraysRequest,
    arrays_answer,
    check_dimensions,
    check_format,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


class EmbeddingsRequest(ArraysRequest):
    """OpenAI's, with vLLM's fields, and the prompts of sentence-transformers."""

    input_type: StrictStr | None = Field(
        None,
        validation_alias=AliasChoices("input_type", "task"),
        description="Use of the texts, such as query or document, as in Cohere, NVIDIA, Voyage "
        "and (as task) Jina: the model's prompt for that use precedes them.",
    )
    prompt_name: PromptName = None
    prompt: StrictStr | None = Field(None, description="A text that precedes the texts.")


@routes.post("/v1/embeddings", batchable=True, responses=BYTES)
async def create_embeddings(body: EmbeddingsRequest, pooling: PoolingDep) -> Response:
    """Return a vector for each text."""
    call = pooling.open("embd", body.model, "embed", own_id=body.request_id)
    check_dimensions(body.dimensions, call.model)
    prompt = asked_prompt(body, call.model.info)
    inputs = await request_inputs(body, call.model, "embed", prompt=prompt)
    check_format(body, len(inputs))
    return await call.respond(
        inputs, lambda encoded: arrays_answer(encoded, body, kind="embedding", field="embedding")
    )


def asked_prompt(body: EmbeddingsRequest, info: PoolingInfo) -> str:
    """Return the prompt that a request chooses, else the model's default.

    Raises:
        InvalidRequestError: the model has no such prompt, or the inputs are not texts.
    """
    names = ("prompt", "prompt_name", "input_type")
    present = [name for name in names if getattr(body, name) is not None]
    if len(present) > 1:
        raise InvalidRequestError(f"Give only one of {', '.join(present)}.", param=present[1])
    is_text = body.messages is None and body.input is not None and isinstance(body.input[0], str)
    if present and not is_text:
        raise InvalidRequestError(f"{present[0]} works with texts only.", param=present[0])
    if body.prompt is not None:
        return body.prompt
    if body.input_type is not None:
        return prompt_of_type(info, body.input_type)
    return named_prompt(info, body.prompt_name)
