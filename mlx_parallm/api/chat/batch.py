"""``POST /v1/chat/completions/batch``: vLLM's answer to several conversations at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Response
from pydantic import Field

from mlx_parallm.api.chat.answer import ChatAnswer
from mlx_parallm.api.chat.request import chat_turn
from mlx_parallm.api.chat.routes import body_fields
from mlx_parallm.api.chat.schema import ChatRequest, Messages
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.turns.prelude import PreludeDep
from mlx_parallm.api.turns.prepare import prepare_turn
from mlx_parallm.api.turns.samples import Answer
from mlx_parallm.api.turns.stream import respond
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.request import MAX_CHOICES

routes = Routes(CHAT, body_limit=INPUT, short=True, in_any_process=True)
# UNSUPPORTED: fields that only a chat of its own may have.
UNSUPPORTED = ("stream", "tools", "functions", "use_beam_search", "store", "nvext")


class BatchChatRequest(ChatRequest):
    """A body of chat with several conversations, which share all other fields."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_CHOICES)] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        description="The conversations, each a list of messages."
    )

    def check_supported(self) -> None:
        """Refuse what needs a request of its own.

        Raises:
            InvalidRequestError: the body streams, has tools or several samples, or is to be stored.
        """
        wrong = next((name for name in UNSUPPORTED if getattr(self, name)), None)
        if wrong is None and self.n != 1:
            wrong = "n"
        if wrong is not None:
            raise InvalidRequestError(
                f"{wrong} is not for several conversations; send each to /v1/chat/completions.",
                param=wrong,
                code="unsupported_parameter",
            )

    def chats(self, answer_id: str) -> list[ChatRequest]:
        """Return a body for each conversation, with ids of their own."""
        shared, begin = dict(self), self.request_id or answer_id
        return [
            ChatRequest.model_construct(
                self.model_fields_set,
                **shared | {"messages": each, "request_id": f"{begin}_{number}"},
            )
            for number, each in enumerate(self.messages)
        ]


@routes.post("/v1/chat/completions/batch")
async def create_chat_completions(body: BatchChatRequest, prelude: PreludeDep) -> Response:
    """Continue several conversations; the answer has a choice for each."""
    body.check_supported()
    admitted = await prelude.admit(body.model, num_prompts=len(body.messages), takes_sources=True)
    chats = body.chats(prelude.answer_id)
    turns = await prelude.on_body(lambda: [chat_turn(chat, prelude) for chat in chats])
    prepared = [await prepare_turn(turn, admitted.model, prelude.images) for turn in turns]
    answers = [ChatAnswer(chat, admitted, each) for chat, each in zip(chats, prepared, strict=True)]
    generation = await admitted.start([each.request for each in prepared], body_fields(body))
    answer_id = f"chatcmpl-{body.request_id or prelude.answer_id}"
    return await respond(prelude, generation, BatchAnswer(answers, answer_id), stream=False)


class BatchAnswer(Answer):
    """Builds one answer to several conversations."""

    def __init__(self, answers: Sequence[ChatAnswer], answer_id: str) -> None:
        self._answers = answers
        self._id = answer_id

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of a conversation."""
        self._answers[prompt].add(0, event)

    def whole(self) -> dict[str, Any]:
        """Return the ``chat.completion``, with the choice of each conversation in order."""
        wholes = [answer.whole() for answer in self._answers]
        choices = [
            {**choice, "index": number}
            for number, whole in enumerate(wholes)
            for choice in whole["choices"]
        ]
        usages = [whole["usage"] for whole in wholes]
        # What belongs to one prompt has no place in the answer to several.
        own = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
        return wholes[0] | own | {"id": self._id, "choices": choices, "usage": _sum(usages)}


def _sum(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of counts of tokens, and of those within them."""
    total: dict[str, Any] = {}
    for key, value in usages[0].items():
        values = [usage[key] for usage in usages if usage.get(key) is not None]
        total[key] = _sum(values) if isinstance(value, dict) else sum(values) if values else value
    return total
