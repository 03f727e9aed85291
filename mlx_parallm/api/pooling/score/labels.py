"""Which of some labels follows a query and an item: SGLang's scores, by generators and classifiers.

See https://docs.sglang.io, "Scoring".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.activation import softmax
from mlx_parallm.api.pooling.inputs.encode import single_inputs
from mlx_parallm.api.pooling.score.schema import ScoreRequest
from mlx_parallm.api.turns.known_tokens import known_tokens, label_request
from mlx_parallm.api.turns.model_choice import generator_or_encoder
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.api.turns.samples import Usage
from mlx_parallm.generation.model import GenerationModel, Tokenizer
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest

FIELDS = {"prompt": "items", "messages": "items", "logprob_token_ids": "label_token_ids"}


Part = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelQuestion:
    """What is asked; the fields are those of the body.

    Attributes:
        query: a text or token ids.
        items: the same; at least one.
        labels: token ids; none for a classifier.
        item_first: whether items stand before the query.
        add_special_tokens: whether texts get the model's.
        truncate: see ``single_inputs``.
        from_left: the same.
    """

    query: Part
    items: Sequence[Part]
    labels: Sequence[int]
    item_first: bool
    add_special_tokens: bool
    truncate: int | None
    from_left: bool

    def parts(self) -> Iterator[tuple[Part, Part]]:
        """Query and item in their order, for each item."""
        for item in self.items:
            yield (item, self.query) if self.item_first else (self.query, item)


@dataclass(slots=True)
class LabelScores:
    """Of each item a number for each label, and token counts."""

    values: list[list[float]]
    usage: Usage = field(default_factory=Usage)


def label_question(body: ScoreRequest) -> LabelQuestion:
    """What a body of SGLang's asks.

    Raises:
        InvalidRequestError: it lacks the query or the items.
    """
    for needed in ("query", "items"):
        if getattr(body, needed) is None:
            raise InvalidRequestError(f"{needed} is missing.", param=needed)
    return LabelQuestion(
        query=body.query or "",
        items=body.items or (),
        labels=body.label_token_ids,
        item_first=body.item_first,
        add_special_tokens=body.add_special_tokens,
        truncate=body.truncate_prompt_tokens,
        from_left=body.truncation_side == "left",
    )


def label_model(engine: EngineClient, name: str | None) -> GenerationModel | PoolingModel:
    """The model of this name, else the first that generates, else the first classifier.

    Raises:
        ModelNotFoundError: none has the name.
        InvalidRequestError: it cannot tell labels apart.
    """
    return generator_or_encoder(engine, name, "classify")


async def classifier_scores(
    engine: EngineClient,
    model: PoolingModel,
    asked: LabelQuestion,
    *,
    request_id: str,
    apply_softmax: bool,
) -> LabelScores:
    """The logits of a classifier's labels, or their softmax, of query and item as one text.

    Raises:
        InvalidRequestError: the labels are named, which are the model's own.
    """
    if asked.labels:
        raise InvalidRequestError(
            f"{model.names[0]} is a classifier: its labels are its own.", param="label_token_ids"
        )
    inputs = await single_inputs(
        _joined(asked),
        model,
        "classify",
        truncate=asked.truncate,
        from_left=asked.from_left,
        add_special_tokens=asked.add_special_tokens,
        param="items",
    )
    found = await engine.encoders.encode(model.request(request_id, inputs))
    values = np.stack(found).astype(np.float64)
    if apply_softmax:
        values = softmax(values)
    num_tokens = sum(len(one.token_ids) for one in inputs)
    return LabelScores(values.tolist(), Usage(prompt_tokens=num_tokens))


def _joined(asked: LabelQuestion) -> list[str] | list[list[int]]:
    parts = list(asked.parts())
    texts = [a + b for a, b in parts if isinstance(a, str) and isinstance(b, str)]
    ids = [[*a, *b] for a, b in parts if not isinstance(a, str) and not isinstance(b, str)]
    if len(parts) not in (len(texts), len(ids)):
        raise InvalidRequestError("query and items are all texts, or all token ids.", param="items")
    return texts or ids


async def encode_prompts(
    asked: LabelQuestion, tokenizer: Tokenizer, *, joins_texts: bool
) -> list[tuple[int, ...]]:
    """The tokens of query and item, for each item.

    Args:
        asked: has both.
        tokenizer: of the model.
        joins_texts: whether texts are joined before they are tokenised, as SGLang does, and not
            after, as vLLM does.
    """

    def ids(part: Part, *, is_first: bool) -> Sequence[int]:
        if not isinstance(part, str):
            return part
        return tokenizer.encode(part, add_special_tokens=asked.add_special_tokens and is_first)

    def work() -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for first, second in asked.parts():
            if joins_texts and isinstance(first, str) and isinstance(second, str):
                found.append(tuple(ids(first + second, is_first=True)))
            else:
                found.append((*ids(first, is_first=True), *ids(second, is_first=False)))
        return found

    length = sum(len(part) for pair in asked.parts() for part in pair if isinstance(part, str))
    return await maybe_in_thread(work, length)


async def generator_scores(
    admitted: Admitted,
    prompts: Sequence[tuple[int, ...]],
    labels: Sequence[int],
    template: GenerateRequest,
    *,
    apply_softmax: bool,
) -> LabelScores:
    """The probabilities of the labels as next tokens, or among one another.

    The first item goes before the others, which then find the query in the prefix cache.

    Raises:
        ParallmError: a request was refused, failed or was aborted.
    """
    requests = [
        label_request(template, number, prompt_ids, labels)
        for number, prompt_ids in enumerate(prompts)
    ]
    parts = (range(1), range(1, len(requests)))
    found = await known_tokens(admitted, requests, parts, FIELDS)
    logprobs = [[value for _, value in one.labels] for one in found]
    values = [_among(one) if apply_softmax else [math.exp(x) for x in one] for one in logprobs]
    usage = Usage(
        prompt_tokens=sum(map(len, prompts)),
        completion_tokens=sum(one.num_sampled for one in found),
        cached_tokens=sum(one.cached_tokens for one in found),
    )
    return LabelScores(values, usage)


def _among(logprobs: Sequence[float]) -> list[float]:
    most = max(logprobs)
    powers = [math.exp(one - most) for one in logprobs]
    return [one / sum(powers) for one in powers]
