"""``/generate``: SGLang's route, which atropos also calls with a body for vLLM."""

from __future__ import annotations

from fastapi import Response

from mlx_parallm.api.http.auth import read_rank
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.sglang.answer import SglangAnswer, VllmPromptAnswer
from mlx_parallm.api.sglang.request import FIELDS, SglangItem, item_params, items_of
from mlx_parallm.api.sglang.schema import UNSUPPORTED_SAMPLING, GenerateBody, prompts_of
from mlx_parallm.api.turns.constraints import body_grammar
from mlx_parallm.api.turns.fields import sampling_params
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.images import pixel_range_of
from mlx_parallm.api.turns.prelude import Prelude, PreludeDep, generator
from mlx_parallm.api.turns.stream import respond
from mlx_parallm.api.turns.written_prompts import WrittenPrompt, read_prompts
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.request import GenerateRequest

routes = Routes(CHAT, body_limit=INPUT, in_any_process=True)

DEFAULT_VLLM_MAX_TOKENS = 16


@routes.post("/generate", responses=STREAMED)
@routes.put("/generate", responses=STREAMED, include_in_schema=False)
async def generate(body: GenerateBody, prelude: PreludeDep) -> Response:
    """Continue one prompt or several."""
    body.check_fields()
    if body.prompt is not None:
        return await _generate_for_vllm(body, prelude)
    source = "text" if body.text is not None else "input_ids"
    fields = FIELDS | {"prompt": source, "messages": source, "request_id": "rid"}
    with named_by(fields):
        prelude.check_room(len(prompts_of(body)))
    items = items_of(body, fallback_rid=prelude.answer_id)
    models = [_model(prelude.engine, body, item) for item in items]
    with named_by(fields):
        for item in items:
            item.sampling_params.refuse(*UNSUPPORTED_SAMPLING)
        admitted = await prelude.admit_to(
            models[0], models[0].names[0], n=items[0].sampling_params.n, num_prompts=len(items)
        )
        pairs = zip(items, models, strict=True)
        written = await read_prompts(
            [
                WrittenPrompt(prompt=item.prompt, model=model, images=item.images)
                for item, model in pairs
            ],
            prelude.images,
            pixel_range_of(body.mm_processor_kwargs),
        )
        requests = [
            await _request(body, item, model, prompt, prelude)
            for item, model, prompt in zip(items, models, written, strict=True)
        ]
    prompts = [prompt.token_ids for prompt in written]
    answer = SglangAnswer(body, items, prompts, models[0].tokenizer)
    generation = await admitted.start(requests, fields)
    return await respond(prelude, generation, answer, stream=body.stream)


def _model(engine: RequestClient, body: GenerateBody, item: SglangItem) -> GenerationModel:
    return generator(engine, body.model, item.lora_path, field="lora_path")[1]


async def _request(
    body: GenerateBody,
    item: SglangItem,
    model: GenerationModel,
    prompt: ImagePrompt,
    prelude: Prelude,
) -> GenerateRequest:
    params = item_params(
        item,
        len(prompt.token_ids),
        max_logprobs=prelude.config.max_logprobs,
        entropy=body.return_entropy,
        grammar=await body_grammar(item.sampling_params, model),
    )
    return GenerateRequest(
        request_id=f"sglang-{item.rid}",
        model=model.names[0],
        prompt_ids=prompt.token_ids,
        inputs=prompt.inputs,
        params=params,
        priority=body.priority,
        client=prelude.client,
        cache_salt=item.cache_salt,
        extra_key=item.extra_key,
        group=f"sglang-{body.rid}" if isinstance(body.rid, str) else None,
        rank=_rank(body, prelude.config.data_parallel_size),
    )


def _rank(body: GenerateBody, num_engines: int) -> int | None:
    name = "data_parallel_rank" if body.routed_dp_rank is None else "routed_dp_rank"
    return read_rank(getattr(body, name), num_engines, name)


async def _generate_for_vllm(body: GenerateBody, prelude: Prelude) -> Response:
    assert body.prompt is not None, "this body has a prompt of vLLM's"
    admitted = await prelude.admit(body.model, n=body.n)
    model = admitted.model
    body.check_supported()
    if body.max_tokens is None:
        body.max_tokens = DEFAULT_VLLM_MAX_TOKENS
    params = sampling_params(
        body, max_logprobs=prelude.config.max_logprobs, grammar=await body_grammar(body, model)
    )
    engine_request = GenerateRequest(
        request_id=f"generate-{prelude.answer_id}",
        model=model.names[0],
        prompt_ids=tuple(body.prompt.prompt_token_ids),
        params=params,
        priority=body.priority,
        client=prelude.client,
    )
    generation = await admitted.start([engine_request], {"messages": "prompt"})
    return await respond(prelude, generation, VllmPromptAnswer(body.n), stream=False)
