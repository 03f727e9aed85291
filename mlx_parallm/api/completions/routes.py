"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import Response

from mlx_parallm.api.completions.answer import CompletionAnswer
from mlx_parallm.api.completions.request import completion_requests, fields_of
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.turns.prelude import PreludeDep
from mlx_parallm.api.turns.stream import respond

routes = Routes(CHAT, body_limit=INPUT, short=True, in_any_process=True)


@routes.post("/v1/completions", batchable=True, responses=STREAMED)
async def create_completion(body: CompletionRequest, prelude: PreludeDep) -> Response:
    """Continue one prompt or several."""
    admitted = await prelude.admit(body.model, n=body.n, takes_sources=True)
    answer_id = f"cmpl-{body.request_id or prelude.answer_id}"
    requests, prompts = await completion_requests(
        body, prelude, admitted.model, answer_id=answer_id
    )
    answer = CompletionAnswer(body, admitted, answer_id, prompts)
    generation = await admitted.start(requests, fields_of(admitted.model))
    return await respond(prelude, generation, answer, stream=body.stream)
