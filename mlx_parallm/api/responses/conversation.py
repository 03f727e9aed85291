"""Conversations that responses go on with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from fastapi import Request

from mlx_parallm.api.http.body_budget import held_body
from mlx_parallm.api.responses.items import Item
from mlx_parallm.api.responses.output import COMPLETED, INCOMPLETE
from mlx_parallm.api.responses.schema import ResponsesInput
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.conversations.service import ConversationService, ConversationTurn
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import InvalidRequestError

# ADDED: the states of responses whose items are added to their conversation.
ADDED = (COMPLETED, INCOMPLETE)


class History(NamedTuple):
    """The items of a conversation, and what they count."""

    items: Sequence[Item] = ()
    num_bytes: int = 0


def conversations_of(request: Request) -> ConversationService:
    """Return the conversations of an application; raise InvalidRequestError if it keeps none."""
    service: ConversationService | None = request.app.state.conversations
    if service is None:
        raise InvalidRequestError(
            "This server keeps no conversations, because it has no data folder (--data-dir).",
            param="conversation",
            code="unsupported_parameter",
        )
    return service


async def begin_turn(
    body: ResponsesInput, prelude: Prelude, stack: ExitStack
) -> ConversationTurn | None:
    """Lock the conversation of a body until ``stack`` is closed; None if it has none.

    Raises:
        NotFoundError: the client has no such conversation.
        InvalidRequestError: another response is made for it, or no conversations are kept.
    """
    if body.conversation_id is None:
        return None
    service = conversations_of(prelude.request)
    turn = await service.begin(body.conversation_id, prelude.client)
    stack.callback(turn.release)
    return turn


async def read_history(body: ResponsesInput, prelude: Prelude) -> History:
    """Return the items of a body's conversation, which count as the body does from then on.

    Raises:
        NotFoundError: the client has no such conversation.
        InvalidRequestError: no conversations are kept.
        RequestTooLargeError: the items are larger than a body may be.
        OverloadedError: the client's requests take too much memory.
    """
    if body.conversation_id is None:
        return History()
    store = await conversations_of(prelude.request).conversations()
    conversation = body.conversation_id, prelude.client, max_bytes(prelude.config)
    num_bytes = await store.size(*conversation)
    held_body(prelude.request.scope).expand(num_bytes)
    return History(await store.items(*conversation), num_bytes)


async def end_turn(turn: ConversationTurn, items: list[Item], response: dict[str, Any]) -> None:
    """Add input and output to a conversation once a response has them all, and unlock it."""
    if response["status"] in ADDED:
        await turn.append([*items, *response["output"]])
    turn.release()


def max_bytes(config: ServerConfig) -> int:
    """Return the most bytes of a conversation that a response goes on with."""
    return max(config.max_body_bytes, config.max_media_body_bytes)
