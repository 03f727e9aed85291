"""Log-probabilities of tokens that are known: of labels after prompts, and of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mlx_parallm.api.turns.prelude import Admitted, Fields
from mlx_parallm.types.errors import RequestAbortedError
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent
from mlx_parallm.types.request import RAW_LOGPROBS, GenerateRequest, SamplingParams
from mlx_parallm.types.step import TokenLogprob


@dataclass(slots=True)
class KnownTokens:
    """The engine's answer to one request.

    Attributes:
        labels: the log-probability of each label as the next token.
        prompt: an entry for each prompt token from ``prompt_logprobs_start`` on.
        cached_tokens: tokens of the prompt that were computed before.
        num_sampled: tokens that the engine counts as generated.
        version: label of the weights.
    """

    labels: Sequence[tuple[int, float]] = ()
    prompt: Sequence[TokenLogprob] = ()
    cached_tokens: int = 0
    num_sampled: int = 0
    version: str = ""

    def add(self, event: PromptEvent | TokenEvent) -> None:
        """Take in an event.

        Raises:
            RequestAbortedError: the request was aborted.
        """
        if isinstance(event, PromptEvent):
            self.prompt = [entry for entry in event.prompt_logprobs or () if entry is not None]
            self.cached_tokens = event.num_cached_tokens
            return
        if event.finish_reason is FinishReason.ABORT:
            raise RequestAbortedError("The request was aborted.")
        self.num_sampled += len(event.token_ids)
        self.version = event.version
        for entry in event.logprobs:
            self.labels = entry.top


def label_request(
    template: GenerateRequest,
    number: int,
    prompt_ids: tuple[int, ...],
    labels: Sequence[int],
    *,
    num_shared: int,
) -> GenerateRequest:
    """Return a request for the log-probabilities of labels of one token after a prompt.

    Args:
        template: has all other fields; its id is that of the group.
        number: of the request in its group.
        prompt_ids: what the labels follow.
        labels: their tokens.
        num_shared: tokens of the prompt with which others of the group begin too.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=0,
        logprobs_mode=RAW_LOGPROBS,
        logprob_token_ids=tuple(labels),
    )
    return replace(
        template,
        request_id=f"{template.request_id}-{number}",
        prompt_ids=prompt_ids,
        turn_start=num_shared,
        params=params,
        group=template.request_id,
    )


async def known_tokens(
    admitted: Admitted,
    requests: Sequence[GenerateRequest],
    parts: Iterable[Sequence[int]],
    fields: Fields,
) -> list[KnownTokens]:
    """Return what the engine says of each request.

    Args:
        admitted: where they run.
        requests: none of which generates more than a token.
        parts: numbers of requests that run together, one part after the other: what the first
            ones compute, later ones find in the prefix cache.
        fields: what the body calls the engine's names.

    Raises:
        ParallmError: a request was refused, failed or was aborted.
    """
    results = [KnownTokens() for _ in requests]
    for part in filter(None, parts):
        generation = await admitted.start([requests[number] for number in part], fields)
        try:
            async for place, event in generation.events():
                results[part[place]].add(event)
        finally:
            await generation.abort()
    return results
