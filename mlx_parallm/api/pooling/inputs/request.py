"""From the body of a route to the inputs of a pooling model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.api.chat.schema import ChatMessage, turns_of
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.inputs.encode import (
    Reading,
    Role,
    named_prompt,
    single_inputs,
    text_limit,
)
from mlx_parallm.api.pooling.inputs.schema import TextsRequest
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput, Task


async def request_inputs(
    body: TextsRequest, model: PoolingModel, task: Task, *, prompt: str = ""
) -> tuple[PoolingInput, ...]:
    """Return the inputs of a request: texts, token ids or conversations.

    Args:
        body: the body, with ``input`` or ``messages``.
        model: reads them.
        task: the task of all inputs.
        prompt: text before every text.

    Raises:
        InvalidRequestError: the body has none or both of them; or an input cannot be read.
    """
    if (body.input is None) == (body.messages is None):
        raise InvalidRequestError("Give either input or messages.", param="input")
    if body.messages is not None:
        reading = body.reading("messages")
        return await single_inputs(await _rendered(body, model, reading), model, task, reading)
    reading = replace(
        body.reading("input"), add_special_tokens=body.add_special_tokens is not False
    )
    return await single_inputs(body.input, model, task, reading, role=Role(prompt=prompt))


async def _rendered(
    body: TextsRequest, model: PoolingModel, reading: Reading
) -> list[tuple[int, ...]]:
    """Return the token ids of each conversation."""
    if body.chat_template is not None:
        raise InvalidRequestError(
            "A request cannot have a chat_template; set it with --chat-template.",
            param="chat_template",
            code="unsupported_parameter",
        )
    if body.add_special_tokens:
        raise InvalidRequestError(
            "Leave out add_special_tokens: the chat template writes the special tokens of "
            "messages.",
            param="add_special_tokens",
        )
    conversations = [template_messages(turns_of(each)) for each in _conversations(body.messages)]
    options: dict[str, Any] = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "template_kwargs": body.chat_template_kwargs,
    }
    limit = text_limit(model, reading)
    return await maybe_in_thread(
        lambda: [
            model.tokenizer.encode_chat(each, limit=replace(limit, first=number), **options)
            for number, each in enumerate(conversations)
        ],
        sum(len(turn["content"] or "") for each in conversations for turn in each),
    )


def _conversations(messages: Sequence[Any] | None) -> list[Sequence[ChatMessage]]:
    conversation = list(messages or ())
    return conversation if isinstance(conversation[0], list) else [conversation]


async def prompted_inputs(
    sources: Sequence[Any], model: PoolingModel, task: Task, reading: Reading, prompt: str | None
) -> tuple[PoolingInput, ...]:
    """Return inputs: texts with the model's prompt of this name, or token ids.

    Raises:
        InvalidRequestError: see ``single_inputs`` and ``named_prompt``; or token ids have a prompt.
    """
    if prompt is not None and not isinstance(sources[0], str):
        raise InvalidRequestError("prompt_name works with texts only.", param="prompt_name")
    role = Role(prompt=named_prompt(model.info, prompt))
    return await single_inputs(sources, model, task, reading, role=role)
