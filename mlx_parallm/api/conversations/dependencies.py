"""Dependencies of routes on what clients store."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from mlx_parallm.conversations.service import ConversationService


async def get_conversations(request: Request) -> ConversationService:
    """Return the conversations and stored chats of this application."""
    return request.app.state.conversations


ConversationsDep = Annotated[ConversationService, Depends(get_conversations)]
