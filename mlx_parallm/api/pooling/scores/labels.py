"""Scores of labels after a query and an item, as in SGLang, by generators and classifiers.

See https://docs.sglang.io, "Scoring".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.answer import PoolingCall, num_tokens
from mlx_parallm.api.pooling.inputs.encode import single_inputs
from mlx_parallm.api.pooling.scores.schema import ScoreRequest
from mlx_parallm.api.pooling.vectors.arrays import softmax
from mlx_parallm.api.turns.known_tokens import known_tokens, label_request
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.api.turns.samples import Usage
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.images.latest_turn import common_length
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest

FIELDS = {"prompt": "items", "messages": "items", "logprob_token_ids": "label_token_ids"}

Part = str | Sequence[int]
#: Query and item, in the order in which the model reads them.
Parts = Sequence[tuple[Part, Part]]


@dataclass(slots=True)
class LabelScores:
    """A number for each label of each item, and token counts."""

    values: list[list[float]]
    usage: Usage


def label_parts(body: ScoreRequest) -> Parts:
    """Return query and item, for each item of a body of SGLang's.

    Raises:
        InvalidRequestError: the body lacks the query or the items.
    """
    for needed in ("query", "items"):
        if getattr(body, needed) is None:
            raise InvalidRequestError(f"{needed} is missing.", param=needed)
    query, items = body.query or "", body.items or ()
    return [(item, query) if body.item_first else (query, item) for item in items]


async def classifier_scores(
    call: PoolingCall, body: ScoreRequest, parts: Parts, *, apply_softmax: bool
) -> LabelScores:
    """Return the logits of a classifier's labels, or their softmax, of query and item as one text.

    Raises:
        InvalidRequestError: the body names labels, but a classifier has its own.
    """
    if body.label_token_ids:
        raise InvalidRequestError(
            f"{call.model.names[0]} is a classifier and has its own labels; leave out "
            "label_token_ids.",
            param="label_token_ids",
        )
    reading = replace(body.reading("items"), add_special_tokens=body.add_special_tokens)
    inputs = await single_inputs(_joined(parts), call.model, "classify", reading)
    values = np.stack(await call.encode(inputs)).astype(np.float64)
    if apply_softmax:
        values = softmax(values)
    return LabelScores(values.tolist(), Usage(prompt_tokens=num_tokens(inputs)))


def _joined(parts: Parts) -> list[str] | list[list[int]]:
    texts = [a + b for a, b in parts if isinstance(a, str) and isinstance(b, str)]
    ids = [[*a, *b] for a, b in parts if not isinstance(a, str) and not isinstance(b, str)]
    if len(parts) not in (len(texts), len(ids)):
        raise InvalidRequestError(
            "query and items must be all texts, or all token ids.", param="items"
        )
    return texts or ids


async def encode_prompts(
    parts: Parts, tokenizer: Tokenizer, *, joins_texts: bool, add_special_tokens: bool
) -> list[tuple[int, ...]]:
    """Return the tokens of query and item, for each item.

    Args:
        parts: query and item.
        tokenizer: the model's.
        joins_texts: True: texts are joined before they are tokenised, as in SGLang; False: after,
            as in vLLM.
        add_special_tokens: True: texts get the model's special tokens.
    """

    def ids(part: Part, *, is_first: bool) -> Sequence[int]:
        if not isinstance(part, str):
            return part
        return tokenizer.encode(part, add_special_tokens=add_special_tokens and is_first)

    def joined(first: Part, second: Part) -> tuple[int, ...]:
        if joins_texts and isinstance(first, str) and isinstance(second, str):
            return tuple(ids(first + second, is_first=True))
        return (*ids(first, is_first=True), *ids(second, is_first=False))

    length = sum(len(part) for pair in parts for part in pair if isinstance(part, str))
    return await maybe_in_thread(lambda: [joined(*pair) for pair in parts], length)


async def generator_scores(
    admitted: Admitted,
    prompts: Sequence[tuple[int, ...]],
    labels: Sequence[int],
    template: GenerateRequest,
    *,
    apply_softmax: bool,
) -> LabelScores:
    """Return the probabilities of the labels as next tokens, or among one another.

    The first item is computed before the others, which then find the query in the prefix cache.

    Raises:
        ParallmError: a request was refused, failed or was aborted.
    """
    num_shared = common_length(prompts[0], prompts[-1])
    requests = [
        label_request(template, number, prompt_ids, labels, num_shared=num_shared)
        for number, prompt_ids in enumerate(prompts)
    ]
    parts = (range(1), range(1, len(requests)))
    known = await known_tokens(admitted, requests, parts, FIELDS)
    logprobs = np.array([[value for _, value in each.labels] for each in known])
    values = softmax(logprobs) if apply_softmax else np.exp(logprobs)
    usage = Usage(
        prompt_tokens=sum(map(len, prompts)),
        completion_tokens=sum(each.num_sampled for each in known),
        cached_tokens=sum(each.cached_tokens for each in known),
    )
    return LabelScores(values.tolist(), usage)
