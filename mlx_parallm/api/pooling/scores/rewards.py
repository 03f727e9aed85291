"""``POST /v1/rewards/score``: rewards of texts and conversations, by a reward model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import Response

from mlx_parallm.api.chat.schema import turns_of
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep
from mlx_parallm.api.pooling.inputs.encode import Reading, single_inputs, text_limit
from mlx_parallm.api.pooling.scores.pairs import logistic
from mlx_parallm.api.pooling.scores.schema import RewardsRequest, Scored
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.template_time import at_one_time
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput, Task
from mlx_parallm.types.token_limit import TokenLimit

#: A text, or the messages of a conversation as templates take them.
Text = str | Sequence[Mapping[str, Any]]
routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


def reward_model(
    client: PoolingClient, name: str | None, task: Task, *, chats: str | None = None
) -> PoolingModel:
    """Return the model of this name, else the one that most likely was made for rewards.

    Args:
        client: the served models.
        name: the name in the body; None: any model.
        task: ``classify`` for rewards of texts, ``token_classify`` for those of steps.
        chats: the body's field with conversations, which a model chosen here must be able to read;
            None: there are no conversations.

    Raises:
        ModelNotFoundError: no model has the name.
        InvalidRequestError: it gives no rewards, or no reward model reads conversations.
    """
    if name is None:
        able = [model for model in client.models() if gives_rewards(model.info, task)]
        if not able:
            raise InvalidRequestError("No reward model of this kind is served.", param="model")
        if chats is not None:
            able = [model for model in able if model.tokenizer.has_chat_template]
        if not able:
            raise InvalidRequestError(
                "No reward model of this server has a chat template: send texts.", param=chats
            )
        return min(able, key=lambda model: _unlikeliness(model.info))
    named = client.get(name, task)
    if not gives_rewards(named.info, task):
        raise InvalidRequestError(
            f"{name} has {len(named.info.labels)} labels; a reward model has one or two.",
            param="model",
        )
    return named


def gives_rewards(info: PoolingInfo, task: Task) -> bool:
    """True if a model's labels mean a reward, of texts or of tokens."""
    return task in info.tasks and len(info.labels) in (1, 2)


def _unlikeliness(info: PoolingInfo) -> tuple[bool, bool, int]:
    """Return a sort key that is smaller for classifiers more likely made for rewards."""
    return not info.is_reward, info.problem_type != "regression", len(info.labels)


async def reward_inputs(
    texts: Sequence[Text],
    model: PoolingModel,
    task: Task,
    reading: Reading,
    *,
    template_kwargs: Mapping[str, Any],
) -> tuple[PoolingInput, ...]:
    """Return the inputs of a reward model; see ``single_inputs``.

    Raises:
        InvalidRequestError: the model has no chat template for a conversation, or the template
            refuses it.
    """
    tokenizer = model.tokenizer
    limit = text_limit(model, reading)

    def ids_of(text: Text, number: int) -> tuple[int, ...]:
        here = replace(limit, first=number)
        if isinstance(text, str):
            return tokenizer.encode([text], limit=here)[0]
        return tokenizer.encode_chat(
            text, add_generation_prompt=False, template_kwargs=template_kwargs, limit=here
        )

    @at_one_time()
    def work() -> list[tuple[int, ...]]:
        plain = [text for text in texts if isinstance(text, str)]
        if len(plain) == len(texts):
            return tokenizer.encode(plain, limit=limit)
        return [ids_of(text, number) for number, text in enumerate(texts)]

    ids = await maybe_in_thread(work, sum(map(_length, texts)))
    return await single_inputs(ids, model, task, reading)


def reward_of(logits: np.ndarray, *, sigmoid: bool) -> float:
    """Return the reward that the logits of one or two labels mean.

    With one label, it is the logit. With two, it is the second logit minus the first, so that its
    logistic function is the second label's probability.

    Args:
        logits: ``[labels]``.
        sigmoid: True: the logistic function is applied.
    """
    value = float(logits[0]) if len(logits) == 1 else float(logits[1]) - float(logits[0])
    return logistic(value) if sigmoid else value


async def step_token_id(token: str | int, model: PoolingModel) -> int:
    """Return the id of the token that ends a step.

    Raises:
        InvalidRequestError: the model has no such token.
    """
    if isinstance(token, int):
        ids: Sequence[int] = [token] if 0 <= token < model.info.vocab_size else []
    else:
        ids = await maybe_in_thread(lambda: _token_ids(token, model), len(token))
    if len(ids) != 1:
        raise InvalidRequestError(
            f"{token!r:.80} is not a token of this model.", param="step_token"
        )
    return ids[0]


def _token_ids(token: str, model: PoolingModel) -> Sequence[int]:
    """Return the id of a token, or those of a text that is no single token."""
    known = model.tokenizer.token_id(token)
    if known is not None:
        return [known]
    # The vocabulary may write a token in another way, such as a line break. Two tokens are enough
    # to see that a text has several.
    limit = TokenLimit(most=1, cuts=True)
    return model.tokenizer.encode([token], add_special_tokens=False, limit=limit)[0]


def _length(text: Text) -> int:
    """Return roughly how many characters there are to tokenise."""
    if isinstance(text, str):
        return len(text)
    return sum(len(str(message.get("content"))) + 64 for message in text)


@routes.post("/v1/rewards/score", batchable=True)
async def score_rewards(body: RewardsRequest, pooling: PoolingDep) -> Response:
    """Return a reward for each text or conversation, or for each of its steps."""
    param, scored = body.param, body.scored()
    if body.step_token is not None and body.truncate_prompt_tokens is not None:
        raise InvalidRequestError(
            "Truncation cannot be combined with step_token, because steps would be lost.",
            param="truncate_prompt_tokens",
        )
    task = "classify" if body.step_token is None else "token_classify"
    chats = None if all(isinstance(each.content, str) for each in scored) else param
    model = reward_model(pooling.client, body.model, task, chats=chats)
    call = pooling.call(model, body.model, "rewards", body.request_id)
    step_id = None if body.step_token is None else await step_token_id(body.step_token, model)
    with named_by({"messages": param}):
        inputs = await reward_inputs(
            [_text(each) for each in scored],
            model,
            task,
            body.reading(param),
            template_kwargs=body.chat_template_kwargs,
        )
    if step_id is not None:
        _check_steps(inputs, step_id, param)
    return await call.respond(
        inputs, lambda encoded: encoded.answer(_data(body, scored, encoded, step_id))
    )


def _text(scored: Scored) -> Text:
    content = scored.content
    return content if isinstance(content, str) else template_messages(turns_of(content))


def _check_steps(inputs: Sequence[PoolingInput], step_id: int, param: str) -> None:
    """Refuse texts without a step."""
    for place, each in enumerate(inputs):
        if step_id not in each.token_ids:
            raise InvalidRequestError(f"{param} {place} has no step_token.", param=param)


def _data(
    body: RewardsRequest, scored: Sequence[Scored], encoded: Encoded, step_id: int | None
) -> list[dict[str, Any]]:
    """Return an entry for each text, with its index among the texts of its prompt."""
    data: list[dict[str, Any]] = []
    counts: Counter[int | None] = Counter()
    for each, text, logits in zip(scored, encoded.inputs, encoded.results, strict=True):
        prompt = each.prompt_index
        entry: dict[str, Any] = {} if prompt is None else {"prompt_index": prompt}
        entry["index"] = counts[prompt]
        counts[prompt] += 1
        if step_id is None:
            entry["reward"] = reward_of(logits, sigmoid=body.sigmoid)
        else:
            rows = logits[np.array(text.token_ids) == step_id]
            entry["steps"] = [reward_of(row, sigmoid=body.sigmoid) for row in rows]
        data.append(entry)
    return data
