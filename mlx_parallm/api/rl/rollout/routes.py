"""``POST /v1/rl/rollout``: groups of samples of many prompts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http import sse
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.errors import BUG, body_of, error_body
from mlx_parallm.api.http.openapi import RL
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.rl.rollout.answer import FIELDS, RolloutAnswer, seed_of
from mlx_parallm.api.rl.rollout.groups import Group, Groups, Judge, Verdict
from mlx_parallm.api.rl.rollout.request import encode_items
from mlx_parallm.api.rl.rollout.reward_model import RewardScorer
from mlx_parallm.api.rl.rollout.schema import RolloutItem, RolloutRequest
from mlx_parallm.api.rl.rollout.verifier import VerifierClient, check_url
from mlx_parallm.api.turns.generation import named_by, unless_disconnected
from mlx_parallm.api.turns.prelude import Admitted, PreludeDep
from mlx_parallm.api.turns.sampling import sampling_params
from mlx_parallm.api.turns.structure import body_grammar
from mlx_parallm.types.request import GenerateRequest

logger = logging.getLogger(__name__)

routes = Routes(RL, body_limit=INPUT, short=True)


@dataclass(slots=True)
class Rollout:
    """A rollout that runs."""

    groups: Groups
    answer: RolloutAnswer
    verifier: VerifierClient | None

    async def close(self) -> None:
        """End what still runs."""
        await self.groups.abort()
        if self.verifier is not None:
            await self.verifier.close()


@routes.post("/v1/rl/rollout", responses=STREAMED)
async def create_rollout(body: RolloutRequest, prelude: PreludeDep) -> Response:
    """Sample groups of continuations, with what a trainer needs to know of each token."""
    items = body.items()
    admitted = await prelude.admit(
        body.model, body.adapter, n=body.n, num_prompts=len(items), fields=FIELDS
    )
    engine, config = prelude.engine, prelude.config
    if body.verifier is not None:
        check_url(body.verifier.url, config.verifier_urls)
    rollout_id = f"rollout-{body.request_id or prelude.answer_id}"
    scorer = None
    if body.reward_model is not None:
        scorer = RewardScorer(
            engine.encoders,
            body.reward_model,
            items,
            admitted.model.tokenizer,
            # Its own: a client may use an id again while its first request runs.
            rollout_id=prelude.answer_id,
        )
    requests = await _requests(body, items, admitted, name=rollout_id)
    generation = await admitted.start(requests, FIELDS)
    answer = RolloutAnswer(body, items, admitted, rollout_id=rollout_id)
    verifier = None
    if body.verifier is not None:
        verifier = VerifierClient(body.verifier.url, body.verifier.timeout_s)
    groups = Groups(
        engine,
        [Group(number, one) for number, one in enumerate(requests)],
        generation,
        judge=_judge(verifier, answer) if scorer is None else scorer.judge,
        timeout_s=body.timeout_s,
    )
    rollout = Rollout(groups, answer, verifier)
    if not body.stream:
        return await unless_disconnected(prelude.request, _collect(rollout, prelude.request))
    return sse.EventStreamResponse(
        _events(rollout, prelude.request),
        on_close=rollout.close,
        keep_alive_s=config.sse_keep_alive_s,
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
    prompts = await encode_items(items, body, model)
    return [
        GenerateRequest(
            request_id=f"{name}-{number}",
            model=model.names[0],
            prompt_ids=prompt_ids,
            params=replace(params, seed=seed_of(number, item, body)),
            priority=body.priority,
            client=prelude.client,
            cache_salt=body.cache_salt,
            group=name,
        )
        for number, (item, prompt_ids) in enumerate(zip(items, prompts, strict=True))
    ]


def _judge(verifier: VerifierClient | None, answer: RolloutAnswer) -> Judge | None:
    if verifier is None:
        return None

    async def judge(group: Group, index: int) -> Verdict:
        return await verifier.judge(answer.judged(group, index))

    return judge


async def _collect(rollout: Rollout, request: Request) -> Response:
    try:
        async for _ in rollout.groups.ended():
            pass
        groups = rollout.groups.groups
        failed = [group.error for group in groups if group.error is not None]
        if failed and not any(group.finished for group in groups):
            raise failed[0]
        errors = [body_of(error, request.scope) for error in failed]
        return JSONResponse(rollout.answer.whole(groups, errors))
    finally:
        await rollout.close()


async def _events(rollout: Rollout, request: Request) -> AsyncIterator[bytes]:
    answer, told = rollout.answer, set[int]()
    try:
        async for group, index in rollout.groups.ended():
            if index is None:
                assert group.error is not None, "a group without a sample has failed"
                yield sse.events(answer.error_event(group, body_of(group.error, request.scope)))
                continue
            yield sse.events(answer.sample_event(group, index, is_first=group.number not in told))
            told.add(group.number)
        yield sse.events(answer.usage_event(rollout.groups.groups))
    except Exception:
        # The status is sent: without an event the client would see a cut connection only.
        logger.exception("a stream failed", extra={"request_id": request.state.request_id})
        yield sse.events({"type": "error"} | error_body(BUG, request.scope))
