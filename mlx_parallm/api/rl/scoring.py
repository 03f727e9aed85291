"""Scores completions that are known, as fast as prompts are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_parallm.api.generation import Generation
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import RequestAbortedError
from mlx_parallm.types.events import FinishReason, PromptEvent
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import TokenLogprob

FIELDS = {
    "prompt": "items",
    "messages": "items",
    "max_tokens": "items",
    "prompt_logprobs": "top_logprobs",
}


@dataclass(slots=True)
class Score:
    """What the engine said of one completion.

    Attributes:
        entries: one per token of the completion.
        cached_tokens: of prompt and completion.
        version: label of the weights.
    """

    entries: Sequence[TokenLogprob] = field(default_factory=tuple)
    cached_tokens: int = 0
    version: str = ""


async def score(
    engine: EngineClient, requests: Sequence[GenerateRequest], *, max_waiting: int | None
) -> list[Score]:
    """Have every request's prompt scored from its ``prompt_logprobs_start`` on.

    Of requests that begin with the same prompt one goes first, and the others then find the prompt
    in the prefix cache.

    Raises:
        ParallmError: a request was refused, failed or was aborted.
    """
    scores = [Score() for _ in requests]
    first: dict[tuple[int, ...], int] = {}
    for number, one in enumerate(requests):
        first.setdefault(_unscored(one), number)
    leaders = sorted(first.values())
    others = sorted(set(range(len(requests))) - set(leaders))
    for part in (leaders, others):
        if part:
            await _run(engine, requests, part, scores, max_waiting)
    return scores


def _unscored(request: GenerateRequest) -> tuple[int, ...]:
    return request.prompt_ids[: request.params.prompt_logprobs_start]


async def _run(
    engine: EngineClient,
    requests: Sequence[GenerateRequest],
    part: Sequence[int],
    scores: Sequence[Score],
    max_waiting: int | None,
) -> None:
    generation = await Generation.start(
        engine, [requests[number] for number in part], fields=FIELDS, max_waiting=max_waiting
    )
    try:
        async for place, event in generation.events():
            number = part[place]
            if isinstance(event, PromptEvent):
                entries = event.prompt_logprobs or ()
                scores[number].entries = [one for one in entries if one is not None]
                scores[number].cached_tokens = event.num_cached_tokens
            elif event.finish_reason is FinishReason.ABORT:
                raise RequestAbortedError("The request was aborted.")
            else:
                scores[number].version = event.version
    finally:
        await generation.abort()
