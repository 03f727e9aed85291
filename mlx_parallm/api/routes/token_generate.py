"""``POST /inference/v1/generate``: vLLM's route from tokens to tokens."""

from __future__ import annotations

from fastapi import Request, Response

from mlx_parallm.api.convert.structure import body_grammar
from mlx_parallm.api.convert.token_generate import FIELDS, TokenAnswer, token_sampling_params
from mlx_parallm.api.declared import INPUT
from mlx_parallm.api.dependencies import (
    ClientDep,
    ConfigDep,
    EngineDep,
    MaxWaitingDep,
)
from mlx_parallm.api.generation import Generation, check_queue, named_by
from mlx_parallm.api.model_choice import generator
from mlx_parallm.api.openapi import RL
from mlx_parallm.api.respond import respond
from mlx_parallm.api.routing import Routes
from mlx_parallm.api.schemas.token_generate import TokenGenerateRequest
from mlx_parallm.api.sse import STREAMED
from mlx_parallm.types.request import GenerateRequest

routes = Routes(RL, body_limit=INPUT)


@routes.post("/inference/v1/generate", responses=STREAMED)
async def generate(
    body: TokenGenerateRequest,
    request: Request,
    engine: EngineDep,
    config: ConfigDep,
    client: ClientDep,
    max_waiting: MaxWaitingDep,
) -> Response:
    """Continue a prompt of token ids, by token ids."""
    name, model = generator(engine, body.model or None)
    with named_by(FIELDS):
        body.check_supported()
        await check_queue(engine, name, client, n=body.sampling_params.n, max_waiting=max_waiting)
        grammar = await body_grammar(body.sampling_params, model)
        params = token_sampling_params(
            body.sampling_params, max_logprobs=config.max_logprobs, grammar=grammar
        )
    request_id = body.request_id or request.state.answer_id
    asked = GenerateRequest(
        request_id=f"generate-{request_id}",
        model=model.names[0],
        prompt_ids=tuple(body.token_ids),
        params=params,
        priority=body.priority,
        client=client,
        cache_salt=body.cache_salt,
    )
    answer = TokenAnswer(body, request_id=request_id, model=name, tokenizer=model.tokenizer)
    generation = await Generation.start(engine, [asked], fields=FIELDS, max_waiting=max_waiting)
    return await respond(request, generation, answer, stream=body.stream, config=config)
