"""``/api/embed`` and ``/api/embeddings``, as Ollama has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.ollama.answer import Durations
from mlx_parallm.api.ollama.dialect import OLLAMA
from mlx_parallm.api.ollama.models import answered_name, served_name
from mlx_parallm.api.ollama.schema import OllamaEmbeddingRequest, OllamaEmbedRequest
from mlx_parallm.api.pooling.answer import Encoded, PoolingCall, PoolingDep, num_tokens
from mlx_parallm.api.pooling.inputs.encode import Reading, Role, named_prompt, single_inputs
from mlx_parallm.api.pooling.vectors.arrays import check_dimensions, finished

routes = Routes(POOLING, dialect=OLLAMA, body_limit=INPUT, in_any_process=True)


@routes.post("/api/embed")
async def ollama_embed(body: OllamaEmbedRequest, pooling: PoolingDep) -> Response:
    """Return a vector of length 1 for each text, in Ollama's shape."""
    times = Durations()
    requested = served_name(pooling.client, body.model)
    call = pooling.open("ollama", requested, "embed")
    check_dimensions(body.dimensions, call.model)
    name = answered_name(body.model, requested, call.name)

    def answer(encoded: Encoded) -> dict[str, Any]:
        info = call.model.info
        vectors = finished(encoded.results, "embed", info, body.dimensions, True)
        measured = times.body()
        return {
            "model": name,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": measured["total_duration"],
            "load_duration": measured["load_duration"],
            "prompt_eval_count": num_tokens(encoded.inputs),
        }

    if body.input == [""]:
        call.on_computed()
        return JSONResponse({"model": name, "embeddings": []})
    reading = Reading(truncate=-1 if body.truncate else None)
    return await _embed(call, body.input, reading, answer)


@routes.post("/api/embeddings")
async def ollama_embeddings(body: OllamaEmbeddingRequest, pooling: PoolingDep) -> Response:
    """Return the vector of a text as the model computes it, in Ollama's older shape."""
    call = pooling.open("ollama", served_name(pooling.client, body.model), "embed")

    def answer(encoded: Encoded) -> dict[str, Any]:
        (vector,) = finished(encoded.results, "embed", call.model.info)
        return {"embedding": vector.tolist()}

    if not body.prompt:
        call.on_computed()
        return JSONResponse({"embedding": []})
    return await _embed(call, [body.prompt], Reading(truncate=-1, param="prompt"), answer)


async def _embed(
    call: PoolingCall,
    texts: Sequence[str],
    reading: Reading,
    answer: Callable[[Encoded], dict[str, Any]],
) -> Response:
    role = Role(prompt=named_prompt(call.model.info, None))
    inputs = await single_inputs(texts, call.model, "embed", reading, role=role)
    return await call.respond(inputs, answer, param=reading.param)
