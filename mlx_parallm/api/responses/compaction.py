"""From a conversation to a summary of it, as ``response.compaction``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.api.responses.answer import response_usage
from mlx_parallm.api.responses.items import Item
from mlx_parallm.api.responses.output import COMPLETED, SummaryWriter
from mlx_parallm.api.responses.request import input_turn
from mlx_parallm.api.responses.schema import ResponsesInput
from mlx_parallm.api.turns.fields import effort_kwargs
from mlx_parallm.api.turns.images import Images
from mlx_parallm.api.turns.prepare import PreparedTurn, prepare_turn
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.samples import Answer
from mlx_parallm.api.turns.truncation import prepare_fitting
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.request import SamplingParams

# MAX_SUMMARY_TOKENS, MAX_SUMMARY_SHARE: bounds on a summary, the second by the model's context.
MAX_SUMMARY_TOKENS = 2048
MAX_SUMMARY_SHARE = 4
INSTRUCTION = (
    "Sum up this conversation so that it can go on from the summary alone: every fact, name, "
    "number, decision, open task and result of a tool. Write only the summary."
)


def summary_turn(
    body: ResponsesInput,
    items: Sequence[Item],
    model: GenerationModel,
    *,
    request_id: str,
    client: str,
) -> TurnRequest:
    """Return what the model is asked for: to sum up the items, without reasoning.

    Raises:
        InvalidRequestError: see ``input_turn``.
    """
    turn = input_turn(body, items, (), request_id=request_id)
    most = min(MAX_SUMMARY_TOKENS, model.info.max_model_len // MAX_SUMMARY_SHARE)
    return replace(
        turn,
        messages=_with_instruction(turn.messages),
        template_kwargs=effort_kwargs("none") | body.chat_template_kwargs,
        params=SamplingParams(temperature=0.0, max_tokens=most, min_tokens=1),
        client=client,
    )


async def prepare_summary(
    body: ResponsesInput, turn: TurnRequest, model: GenerationModel, images: Images
) -> PreparedTurn:
    """Return the turn for the engine; where the context leaves less room, it may be shorter.

    Raises:
        InvalidRequestError: see ``prepare_turn``.
    """
    prepare = prepare_fitting if body.truncation == "auto" else prepare_turn
    prepared = await prepare(turn, model, images)
    params = prepared.request.params
    room = max(1, model.info.max_model_len - len(prepared.prompt_ids))
    if params.max_tokens is None or params.max_tokens <= room:
        return prepared
    request = replace(prepared.request, params=replace(params, max_tokens=room))
    return replace(prepared, request=request)


def _with_instruction(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the instruction at the end, in the last one if it is the user's."""
    last = messages[-1]
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{INSTRUCTION}"}]
    return [*messages, {"role": "user", "content": INSTRUCTION}]


class CompactionAnswer(Answer):
    """Builds a ``response.compaction``: the messages of the user, and a summary of everything."""

    def __init__(self, prepared: PreparedTurn, items: Sequence[Item]) -> None:
        self._id = prepared.request.request_id
        self._stream = prepared.stream()
        self._writer = SummaryWriter()
        self._kept = [item for item in items if _is_users(item)]

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the summary."""
        parts = self._stream.add(event)
        self._writer.add(parts, [[] for _ in parts])

    def whole(self) -> dict[str, Any]:
        """Return the object.

        Raises:
            ParallmError: the model wrote nothing.
        """
        self._writer.close(COMPLETED)
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._kept, *self._writer.items()],
            "usage": response_usage(self._stream.usage),
        }


def _is_users(item: Item) -> bool:
    return item["type"] == "message" and item["role"] == "user"
