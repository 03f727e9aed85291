"""``POST /v1/rl/rollout``: groups of samples of many prompts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http import sse
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.errors import BUG, body_of, error_body
from mlx_parallm.api.http.openapi import RL
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.rl.answer import FIELDS, RolloutAnswer, seed_of
from mlx_parallm.api.rl.groups import Groups, Judge
from mlx_parallm.api.rl.judges import RewardScorer, VerifierClient, check_url
from mlx_parallm.api.rl.request import encode_items
from mlx_parallm.api.rl.schema import RolloutItem, RolloutRequest
from mlx_parallm.api.turns.constraints import body_grammar
from mlx_parallm.api.turns.fields import sampling_params
from mlx_parallm.api.turns.generation import named_by, unless_disconnected
from mlx_parallm.api.turns.prelude import Admitted, PreludeDep
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.types.request import GenerateRequest

logger = logging.getLogger(__name__)

routes = Routes(RL, body_limit=INPUT, short=True, in_any_process=True)


@routes.post("/v1/rl/rollout", responses=STREAMED)
async def create_rollout(body: RolloutRequest, prelude: PreludeDep) -> Response:
    """Sample groups of continuations, with what a trainer needs to know of each token."""
    with named_by(FIELDS):
        prelude.check_room(len(body.prompts), body.n)
    items = body.items()
    admitted = await prelude.admit(
        body.model, body.adapter, n=body.n, num_prompts=len(items), fields=FIELDS
    )
    rollout_id = f"rollout-{body.request_id or prelude.answer_id}"
    answer = RolloutAnswer(body, items, admitted, rollout_id=rollout_id)
    judge = _judge(body, items, admitted, answer)
    requests = await _requests(body, items, admitted, name=rollout_id)
    generation = await admitted.start(requests, FIELDS)
    groups = Groups(prelude.engine, requests, generation, judge=judge, timeout_s=body.timeout_s)
    if not body.stream:
        collected = _collect(groups, answer, prelude.request)
        return await unless_disconnected(prelude.request, collected)
    return sse.EventStreamResponse(
        _events(groups, answer, prelude.request),
        on_close=groups.close,
        keep_alive_s=prelude.config.sse_keep_alive_s,
    )


def _judge(
    body: RolloutRequest, items: Sequence[RolloutItem], admitted: Admitted, answer: RolloutAnswer
) -> Judge | None:
    """Return the body's reward model or verifier, if any.

    Raises:
        InvalidRequestError: the server may not ask this verifier, or there is no such reward model.
    """
    prelude = admitted.prelude
    if body.verifier is not None:
        check_url(body.verifier.url, prelude.config.verifier_urls)
        return VerifierClient(body.verifier, answer.judged)
    if body.reward_model is None:
        return None
    return RewardScorer(
        POOLING.client(prelude.engine),
        body.reward_model,
        items,
        admitted.model.tokenizer,
        # A client may use an id again while its first request runs.
        rollout_id=prelude.answer_id,
    )


async def _requests(
    body: RolloutRequest,
    items: Sequence[RolloutItem],
    admitted: Admitted,
    *,
    name: str,
) -> list[GenerateRequest]:
    model, prelude = admitted.model, admitted.prelude
    with named_by(FIELDS):
        params = sampling_params(
            body,
            max_logprobs=prelude.config.max_logprobs,
            logprobs=body.top_logprobs,
            grammar=await body_grammar(body, model),
        )
    prompts = await encode_items(items, body, model, prelude.images)
    return [
        GenerateRequest(
            request_id=f"{name}-{number}",
            model=model.names[0],
            prompt_ids=prompt.token_ids,
            inputs=prompt.inputs,
            turn_start=prompt.turn_start,
            answer_start=prompt.answer_start,
            params=replace(params, seed=seed_of(number, item, body), values=body.wants_values),
            priority=body.priority,
            client=prelude.client,
            cache_salt=body.cache_salt,
            group=name,
        )
        for number, (item, prompt) in enumerate(zip(items, prompts, strict=True))
    ]


async def _collect(groups: Groups, answer: RolloutAnswer, request: Request) -> Response:
    try:
        async for _ in groups.ended():
            pass
        failures = [group.error for group in groups.all if group.error is not None]
        if failures and not any(group.finished for group in groups.all):
            raise failures[0]
        errors = [body_of(error, request.scope) for error in failures]
        return JSONResponse(answer.whole(groups.all, errors))
    finally:
        await groups.close()


async def _events(groups: Groups, answer: RolloutAnswer, request: Request) -> AsyncIterator[bytes]:
    begun = set[int]()
    try:
        async for group, index in groups.ended():
            if index is None:
                assert group.error is not None, "a group without a sample has failed"
                yield sse.events(answer.error_event(group, body_of(group.error, request.scope)))
                continue
            yield sse.events(answer.sample_event(group, index, is_first=group.number not in begun))
            begun.add(group.number)
        yield sse.events(answer.usage_event(groups.all))
    except Exception:
        # The status is sent: without an event the client would see a cut connection only.
        logger.exception("a stream failed", extra={"request_id": request.state.request_id})
        yield sse.events({"type": "error"} | error_body(BUG, request.scope))
