"""From SGLang's body, whose fields may be lists, to one request per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.api.sglang.schema import (
    UNSUPPORTED_SAMPLING,
    GenerateBody,
    SglangSamplingParams,
    is_batch,
    prompts_of,
)
from mlx_parallm.api.turns.fields import sampling_params
from mlx_parallm.api.turns.images import ImageSource, named_sources
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.json_values import is_list
from mlx_parallm.types.request import SamplingParams

_OWN_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
# What the body calls the engine's names.
FIELDS = {
    **{
        name: f"sampling_params.{_OWN_NAMES.get(name, name)}"
        for name in (*SglangSamplingParams.model_fields, "max_tokens", *UNSUPPORTED_SAMPLING)
    },
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}


# Fields of which a body has one value, or a list with one for each prompt.
PER_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "lora_path",
    "extra_key",
    "cache_salt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangItem:
    """One prompt of a request and what belongs to it.

    Attributes:
        prompt: a text or token ids.
        rid: its id.
        sampling_params: how it is sampled.
        return_logprob: whether log-probabilities are returned.
        logprob_start_len: from which prompt token on they are returned; -1: of no prompt token.
        top_logprobs_num: likeliest tokens at each place.
        token_ids_logprob: tokens to report instead.
        lora_path: the name of its adapter, if it is not the model itself.
        cache_salt: it shares cached prefixes only with the same salt.
        extra_key: it shares them only with the same key.
        images: in place of its placeholders, in order.
    """

    prompt: str | list[int]
    rid: str
    sampling_params: SglangSamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Sequence[int] | None
    lora_path: str | None
    cache_salt: str | None
    extra_key: str | None
    images: Sequence[ImageSource] = ()


def items_of(body: GenerateBody, *, fallback_rid: str) -> list[SglangItem]:
    """Return one item per prompt.

    Raises:
        InvalidRequestError: a list has another length than there are prompts, or ``n`` differs.
    """
    prompts = prompts_of(body)
    count = len(prompts)
    if not count:
        raise InvalidRequestError("There is no prompt.", param="text")
    values = {name: _spread(getattr(body, name), count, name) for name in PER_PROMPT}
    if len({sampling.n for sampling in values["sampling_params"]}) > 1:
        raise InvalidRequestError("n must be the same for all prompts.", param="sampling_params.n")
    rids = _rids(body, count, fallback_rid)
    images = _images(body, count)
    return [
        SglangItem(
            prompt=prompts[number],
            rid=rids[number],
            images=images[number],
            **{name: entries[number] for name, entries in values.items()},
        )
        for number in range(count)
    ]


def item_params(
    item: SglangItem, prompt_len: int, *, max_logprobs: int, entropy: bool, grammar: Grammar | None
) -> SamplingParams:
    """Return the engine's parameters for one prompt.

    Raises:
        InvalidRequestError: a value is out of range, or a combination is not offered.
    """
    _check_logprobs(item, prompt_len)
    sampling, wanted = item.sampling_params, item.return_logprob
    scores_prompt = wanted and item.logprob_start_len >= 0
    return sampling_params(
        sampling,
        max_logprobs=max_logprobs,
        max_tokens=sampling.max_new_tokens,
        min_tokens=max(sampling.min_tokens, sampling.min_new_tokens),
        seed=sampling.seed if sampling.sampling_seed is None else sampling.sampling_seed,
        include_stop_str_in_output=sampling.include_stop_str_in_output or sampling.no_stop_trim,
        logprobs=item.top_logprobs_num if wanted else None,
        logprob_token_ids=tuple(item.token_ids_logprob or ()) if wanted else (),
        prompt_logprobs=item.top_logprobs_num if scores_prompt else None,
        # SGLang gives the first token of the range no log-probability.
        prompt_logprobs_start=item.logprob_start_len + 1 if scores_prompt else 0,
        entropy=entropy and wanted,
        grammar=grammar,
    )


def _check_logprobs(item: SglangItem, prompt_len: int) -> None:
    if not -1 <= item.logprob_start_len < prompt_len:
        raise InvalidRequestError(
            f"logprob_start_len must be -1 or a place in the prompt of {prompt_len} tokens.",
            param="logprob_start_len",
        )
    if item.top_logprobs_num < 0:
        raise InvalidRequestError(
            "top_logprobs_num must not be negative.", param="top_logprobs_num"
        )
    if item.token_ids_logprob and (item.top_logprobs_num or item.logprob_start_len >= 0):
        raise InvalidRequestError(
            "token_ids_logprob is for sampled tokens, and not together with top_logprobs_num.",
            param="token_ids_logprob",
            code="unsupported_parameter",
        )


def _spread(value: Any, count: int, name: str) -> Sequence[Any]:
    """Return one value per prompt."""
    # The token ids of one prompt are a list themselves.
    is_nested = name == "token_ids_logprob"
    if not is_list(value) or (is_nested and not (value and is_list(value[0]))):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(
            f"{name} needs one entry for each of {count} prompts.", param=name
        )
    return value


def _images(body: GenerateBody, count: int) -> list[list[ImageSource]]:
    """Return the images of each prompt."""
    data = body.image_data
    if not is_batch(body):
        return [named_sources(data, "image_data")]
    entries = [None] * count if data is None else _spread(data, count, "image_data")
    return [named_sources(entry, f"image_data[{number}]") for number, entry in enumerate(entries)]


def _rids(body: GenerateBody, count: int, fallback: str) -> list[str]:
    rid = body.rid
    if isinstance(rid, list):
        if len(rid) != count or len(set(rid)) != count:
            raise InvalidRequestError("rid needs one id for each prompt.", param="rid")
        return list(rid)
    rid = rid or fallback
    return [f"{rid}_{number}" for number in range(count)] if is_batch(body) else [rid]
