"""From a request body to sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.api.turns.fields import SamplingFields
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import ALL_TOKENS, Grammar, SamplingParams


def sampling_params(
    body: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    max_logprobs: int,
    n: int = 1,
    grammar: Grammar | None = None,
    logprob_token_ids: Sequence[int] = (),
) -> SamplingParams:
    """The engine's parameters of a body.

    Args:
        body: what they share.
        max_tokens: most tokens to generate.
        logprobs: likeliest tokens per sampled token; -1 for all.
        prompt_logprobs: the same per prompt token.
        max_logprobs: most of them; -1 is no limit.
        n: samples.
        grammar: what they must match.
        logprob_token_ids: tokens to tell in place of the likeliest.

    Raises:
        InvalidRequestError: a value is out of range, or more log-probabilities are asked for than
            the server allows.
    """
    for name, asked in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if asked is None or max_logprobs == ALL_TOKENS:
            continue
        if asked > max_logprobs or asked == ALL_TOKENS:
            name = "top_logprobs" if name == "logprobs" and hasattr(body, "top_logprobs") else name
            raise InvalidRequestError(f"{name} is at most {max_logprobs} here.", param=name)
    return SamplingParams(
        n=n,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.biases(),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=body.stops(),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        logprobs_mode=body.logprobs_mode,
        logprob_token_ids=tuple(logprob_token_ids),
        prompt_logprobs=prompt_logprobs,
        speculative=body.speculative,
        grammar=grammar,
    )
