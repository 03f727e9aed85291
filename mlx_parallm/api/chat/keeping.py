"""Chats whose requests want them stored."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from mlx_parallm.api.chat.answer import KeepAnswer
from mlx_parallm.api.chat.schema import ChatRequest
from mlx_parallm.api.http.forms import Metadata
from mlx_parallm.api.http.uploads import validated
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.conversations.chats import stored_chat
from mlx_parallm.conversations.records import KeepsChats
from mlx_parallm.storage.disk import in_thread


class KeptFields(BaseModel):
    """The fields of a stored chat besides its messages."""

    metadata: Metadata = Field(default_factory=dict[str, str])


def keeping(body: ChatRequest, prelude: Prelude) -> KeepAnswer | None:
    """Return what stores the answer to a body; None if it wants that not, or there is no folder.

    Raises:
        InvalidRequestError: its metadata are malformed.
    """
    keep_chat: KeepsChats | None = prelude.request.app.state.keep_chat
    if not body.store or keep_chat is None:
        return None
    fields = validated(KeptFields, {"metadata": body.metadata or {}})

    async def keep(answer: dict[str, Any]) -> None:
        # To write images as JSON takes long.
        chat = await in_thread(
            lambda: stored_chat(
                prelude.client,
                answer,
                [message.model_dump(exclude_unset=True) for message in body.messages],
                fields.metadata,
            )
        )
        await keep_chat(chat)

    return keep
