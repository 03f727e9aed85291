"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import Request, Response

from mlx_parallm.api.completions.answer import CompletionAnswer
from mlx_parallm.api.completions.infill import with_infill_ends
from mlx_parallm.api.completions.prompts import encode_prompts
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.turns.answer import AnswerHead
from mlx_parallm.api.turns.fingerprint import system_fingerprint
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.logprobs import TokenNames, most_asked
from mlx_parallm.api.turns.prelude import PreludeDep
from mlx_parallm.api.turns.respond import respond
from mlx_parallm.api.turns.sampling import sampling_params
from mlx_parallm.api.turns.structure import body_grammar
from mlx_parallm.config import ServerConfig
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.types.request import GenerateRequest, Grammar, SamplingParams

routes = Routes(CHAT, body_limit=INPUT, short=True)

FIELDS = {"messages": "prompt"}


@routes.post("/v1/completions", batchable=True, responses=STREAMED)
async def create_completion(
    body: CompletionRequest, request: Request, prelude: PreludeDep
) -> Response:
    """Continue one prompt or several."""
    admitted = await prelude.admit(body.model, n=body.n)
    answer_id = f"cmpl-{body.request_id or prelude.answer_id}"
    model, config = admitted.model, admitted.config
    asked, prompts = await prepare_completion(
        body, model, config, name=answer_id, client=admitted.client
    )
    head = AnswerHead(
        id=answer_id,
        object="text_completion",
        model=admitted.name,
        fingerprint=system_fingerprint(admitted.engine, model),
    )
    names = TokenNames(model.tokenizer, as_ids=body.return_tokens_as_token_ids)
    answer = CompletionAnswer(body, head, names, prompts)
    generation = await admitted.start(asked, FIELDS)
    return await respond(request, generation, answer, stream=body.stream, config=config)


async def prepare_completion(
    body: CompletionRequest, model: GenerationModel, config: ServerConfig, *, name: str, client: str
) -> tuple[list[GenerateRequest], list[tuple[str, tuple[int, ...]]]]:
    """The engine's requests, and each prompt as text and tokens.

    Raises:
        InvalidRequestError: a field is out of range, or asks for what is not served.
    """
    body.check_supported()
    params = _params(body, config, await body_grammar(body, model))
    with named_by(FIELDS):
        prompts = await encode_prompts(body, model)
    if body.suffix:
        params = with_infill_ends(params, model.tokenizer)
    ids = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(len(prompts))]
    asked = [
        GenerateRequest(
            request_id=request_id,
            model=model.names[0],
            prompt_ids=prompt_ids,
            params=params,
            priority=body.priority,
            client=client,
            cache_salt=body.cache_salt,
            group=name,
        )
        for request_id, (_, prompt_ids) in zip(ids, prompts, strict=True)
    ]
    return asked, prompts


def _params(
    body: CompletionRequest, config: ServerConfig, grammar: Grammar | None
) -> SamplingParams:
    # Both show the prompt's tokens, each with its own number of alternatives.
    shown = (body.prompt_logprobs, body.top() if body.echo else None)
    return sampling_params(
        body,
        max_tokens=body.max_tokens,
        logprobs=body.top(),
        prompt_logprobs=most_asked(shown),
        max_logprobs=config.max_logprobs,
        n=body.n,
        grammar=grammar,
        logprob_token_ids=body.logprob_token_ids,
    )
