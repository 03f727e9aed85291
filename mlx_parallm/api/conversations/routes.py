"""``/v1/conversations``: items that responses go on with; every client sees its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import Field

from mlx_parallm.api.conversations.dependencies import ConversationsDep
from mlx_parallm.api.files.schema import list_object
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import ClientDep
from mlx_parallm.api.http.forms import Metadata, MetadataUpdate, NullIsAbsent
from mlx_parallm.api.http.openapi import CHAT
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.responses.include import IncludeDep, shown
from mlx_parallm.api.responses.items import TRIGGER, Item, input_items
from mlx_parallm.api.responses.routes import ResponsesDep
from mlx_parallm.api.responses.service import ResponseService
from mlx_parallm.api.turns.prelude import PreludeDep
from mlx_parallm.conversations.records import ConversationRecord
from mlx_parallm.types.errors import InvalidRequestError

routes = Routes(CHAT, body_limit=INPUT, short=True)
# MAX_ITEMS: items of a body, as at OpenAI.
MAX_ITEMS = 20
Items = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)]


class CreateConversation(NullIsAbsent):
    """A conversation to be created."""

    items: Items = Field(default_factory=list[dict[str, Any]], description="Its first items.")
    metadata: Metadata = Field(
        default_factory=dict[str, str], description="Kept with the conversation."
    )


class CreateItems(NullIsAbsent):
    """Items to be added to a conversation."""

    items: Items = Field(min_length=1, description="They come behind those that are there.")


@routes.post("/v1/conversations")
async def create_conversation(
    body: CreateConversation,
    prelude: PreludeDep,
    conversations: ConversationsDep,
    responses: ResponsesDep,
) -> dict[str, Any]:
    """Create a conversation, perhaps with items."""
    client = prelude.client
    items = await prelude.on_body(lambda: _items(body.items, responses, client))
    store = await conversations.conversations()
    return conversation_object(await store.create(client, body.metadata, items))


@routes.get("/v1/conversations/{conversation_id}")
async def retrieve_conversation(
    conversation_id: str, client: ClientDep, conversations: ConversationsDep
) -> dict[str, Any]:
    """Return a conversation without its items."""
    store = await conversations.conversations()
    return conversation_object(await store.get(conversation_id, client))


@routes.post("/v1/conversations/{conversation_id}")
async def update_conversation(
    conversation_id: str,
    body: MetadataUpdate,
    client: ClientDep,
    conversations: ConversationsDep,
) -> dict[str, Any]:
    """Replace the metadata of a conversation."""
    store = await conversations.conversations()
    return conversation_object(await store.update(conversation_id, client, body.metadata))


@routes.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(
    conversation_id: str, client: ClientDep, conversations: ConversationsDep
) -> dict[str, Any]:
    """Delete a conversation with its items."""
    store = await conversations.conversations()
    await store.get(conversation_id, client)
    conversations.check_unlocked(conversation_id)
    await store.delete(conversation_id, client)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@routes.post("/v1/conversations/{conversation_id}/items")
async def create_items(
    conversation_id: str,
    body: CreateItems,
    prelude: PreludeDep,
    conversations: ConversationsDep,
    responses: ResponsesDep,
    include: IncludeDep,
) -> dict[str, Any]:
    """Add items to a conversation."""
    client = prelude.client
    items = await prelude.on_body(lambda: _items(body.items, responses, client))
    store = await conversations.conversations()
    await store.get(conversation_id, client)
    conversations.check_unlocked(conversation_id)
    await store.append(conversation_id, client, items)
    return _page(items, include)


@routes.get("/v1/conversations/{conversation_id}/items")
async def list_items(
    conversation_id: str,
    client: ClientDep,
    conversations: ConversationsDep,
    include: IncludeDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List the items of a conversation; ``after`` is the last id of the page before."""
    store = await conversations.conversations()
    items, has_more = await store.list(
        conversation_id, client, after=after, limit=limit, descending=order == "desc"
    )
    return _page(items, include, has_more=has_more)


@routes.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_item(
    conversation_id: str,
    item_id: str,
    client: ClientDep,
    conversations: ConversationsDep,
    include: IncludeDep,
) -> dict[str, Any]:
    """Return an item of a conversation."""
    store = await conversations.conversations()
    return shown(await store.item(conversation_id, item_id, client), include)


@routes.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(
    conversation_id: str, item_id: str, client: ClientDep, conversations: ConversationsDep
) -> dict[str, Any]:
    """Delete an item, and return its conversation."""
    store = await conversations.conversations()
    await store.get(conversation_id, client)
    conversations.check_unlocked(conversation_id)
    return conversation_object(await store.delete_item(conversation_id, item_id, client))


def conversation_object(record: ConversationRecord) -> dict[str, Any]:
    """Return a conversation in OpenAI's form."""
    return {
        "id": record.id,
        "object": "conversation",
        "created_at": record.created_at,
        "metadata": record.metadata,
    }


def _items(content: list[Item], responses: ResponseService, client: str) -> list[Item]:
    for number, item in enumerate(content):
        if item.get("type") == TRIGGER:
            where = f"items[{number}].type"
            raise InvalidRequestError(f"{where}: no conversation keeps a {TRIGGER}.", param=where)
    return input_items(content, lambda id_: responses.find_item(id_, client), where="items")


def _page(items: list[Item], include: Sequence[str], *, has_more: bool = False) -> dict[str, Any]:
    return list_object([shown(item, include) for item in items], has_more)
