"""``POST /inference/v1/generate``: vLLM's token-in, token-out route."""

from __future__ import annotations

from fastapi import Response

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import RL
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.turns.constraints import body_grammar
from mlx_parallm.api.turns.fields import sampling_params
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.images import pixel_range_of
from mlx_parallm.api.turns.prelude import PreludeDep
from mlx_parallm.api.turns.stream import respond
from mlx_parallm.api.turns.written_prompts import WrittenPrompt, read_prompts
from mlx_parallm.api.vllm.answer import FIELDS, TokenAnswer
from mlx_parallm.api.vllm.schema import TokenGenerateRequest
from mlx_parallm.types.request import GenerateRequest

routes = Routes(RL, body_limit=INPUT, in_any_process=True)


@routes.post("/inference/v1/generate", responses=STREAMED)
async def generate(body: TokenGenerateRequest, prelude: PreludeDep) -> Response:
    """Continue a prompt of token ids; the answer has token ids."""
    n = body.sampling_params.n
    admitted = await prelude.admit(body.model or None, n=n, fields=FIELDS)
    model = admitted.model
    with named_by(FIELDS):
        body.check_supported()
        grammar = await body_grammar(body.sampling_params, model)
        params = sampling_params(
            body.sampling_params, max_logprobs=prelude.config.max_logprobs, grammar=grammar
        )
        written = WrittenPrompt(prompt=body.token_ids, model=model, images=body.images())
        pixel_range = pixel_range_of(body.mm_processor_kwargs)
        (prompt,) = await read_prompts([written], prelude.images, pixel_range)
    request_id = body.request_id or prelude.answer_id
    generate_request = GenerateRequest(
        request_id=f"generate-{request_id}",
        model=model.names[0],
        prompt_ids=prompt.token_ids,
        inputs=prompt.inputs,
        params=params,
        priority=body.priority,
        client=prelude.client,
        cache_salt=body.cache_salt,
    )
    answer = TokenAnswer(
        body, prompt, request_id=request_id, model=admitted.name, tokenizer=model.tokenizer
    )
    generation = await admitted.start([generate_request], FIELDS)
    return await respond(prelude, generation, answer, stream=body.stream)
