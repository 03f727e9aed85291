"""Stored chats: ``/v1/chat/completions`` with ``store``, by id; every client sees its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query, Request

from mlx_parallm.api.conversations.dependencies import ConversationsDep
from mlx_parallm.api.files.schema import list_object, page_of
from mlx_parallm.api.http.dependencies import ClientDep
from mlx_parallm.api.http.forms import MetadataUpdate, metadata_pairs
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.conversations.records import StoredChat
from mlx_parallm.types.json_values import is_list

routes = Routes(CHAT, short=True)
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
# NOT_SHOWN: keys of a message that a stored one has in another form.
NOT_SHOWN = frozenset({"content", "role"})


@routes.get("/v1/chat/completions")
async def list_chats(
    request: Request,
    client: ClientDep,
    conversations: ConversationsDep,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
    model: str | None = None,
) -> dict[str, Any]:
    """List the caller's stored chats by age; ``metadata[key]=value`` chooses among them."""
    store = await conversations.chats()
    chats, has_more = await store.list(
        client,
        model=model,
        metadata=metadata_pairs(request.query_params.multi_items()),
        after=after,
        limit=limit,
        descending=order == "desc",
    )
    return list_object([chat_object(chat) for chat in chats], has_more)


@routes.get("/v1/chat/completions/{completion_id}")
async def retrieve_chat(
    completion_id: str, client: ClientDep, conversations: ConversationsDep
) -> dict[str, Any]:
    """Return a stored chat's answer."""
    store = await conversations.chats()
    return chat_object(await store.get(completion_id, client))


@routes.post("/v1/chat/completions/{completion_id}")
async def update_chat(
    completion_id: str, body: MetadataUpdate, client: ClientDep, conversations: ConversationsDep
) -> dict[str, Any]:
    """Replace the metadata of a stored chat."""
    store = await conversations.chats()
    return chat_object(await store.update(completion_id, client, body.metadata))


@routes.delete("/v1/chat/completions/{completion_id}")
async def delete_chat(
    completion_id: str, client: ClientDep, conversations: ConversationsDep
) -> dict[str, Any]:
    """Delete a stored chat."""
    store = await conversations.chats()
    await store.delete(completion_id, client)
    return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}


@routes.get("/v1/chat/completions/{completion_id}/messages")
async def list_messages(
    completion_id: str,
    client: ClientDep,
    conversations: ConversationsDep,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> dict[str, Any]:
    """List the messages that a stored chat answers; ``after`` is the last id of the page before."""
    store = await conversations.chats()
    messages = message_objects(await store.get(completion_id, client))
    page, has_more = page_of(
        messages, after=after, limit=limit, descending=order == "desc", kind="message"
    )
    return list_object(page, has_more)


def chat_object(chat: StoredChat) -> dict[str, Any]:
    """Return a stored chat in OpenAI's form."""
    return chat.content.answer | {"metadata": chat.record.metadata}


def message_objects(chat: StoredChat) -> list[dict[str, Any]]:
    """Return the messages of a stored chat in OpenAI's form, each with an id."""
    return [
        _message_object(f"{chat.record.chat_id}-{number}", message)
        for number, message in enumerate(chat.content.messages)
    ]


def _message_object(message_id: str, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if is_list(content) else None
    others = {key: value for key, value in message.items() if key not in NOT_SHOWN}
    return {
        "id": message_id,
        "role": message["role"],
        "content": None if parts is not None else content,
        "content_parts": parts,
        "refusal": None,
        "name": None,
        **others,
    }
