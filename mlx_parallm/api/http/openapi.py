"""The OpenAPI document: FastAPI's, with groups and the keys that operations need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_parallm.api.http.declared import Access
from mlx_parallm.config import ServerConfig

CHAT = "chat"
POOLING = "embeddings and scores"
TOKENS = "tokens and templates"
FILES = "files and batches"
RL = "reinforcement learning"
SERVER = "server"
# CONTROL: the group of routes that need the admin key.
CONTROL = "control"
# GROUPS: descriptions of groups, in the order of /docs.
GROUPS = {
    CHAT: "Text of models that generate, in the forms of several APIs.",
    POOLING: "What models read: vectors, classes, scores, rewards.",
    TOKENS: "Texts to tokens and back, and what chat templates make of messages.",
    FILES: "Files, and batches of requests that are answered in the background.",
    RL: "Rollouts and log-probabilities for trainers.",
    SERVER: "What is served and how it is.",
    CONTROL: "Routes that change the server. They need the admin key, where one is set.",
}
API_KEY = "ApiKey"
ADMIN_KEY = "AdminKey"


def complete(
    document: dict[str, Any], config: ServerConfig, access: Mapping[tuple[str, str], Access]
) -> None:
    """Add to FastAPI's document its groups and the keys of this server.

    Args:
        document: FastAPI's document.
        config: the settings with the keys.
        access: the callers who may use an operation, by its method and path.
    """
    document["tags"] = [{"name": name, "description": text} for name, text in GROUPS.items()]
    document.setdefault("components", {})["securitySchemes"] = _schemes(config)
    document["security"] = _needed(config, Access.KEY)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needed = access.get((method.upper(), path), Access.KEY)
            if needed is not Access.KEY:
                operation["security"] = _needed(config, needed)


def _needed(config: ServerConfig, access: Access) -> list[dict[str, list[str]]]:
    """Return the alternative keys of an operation; an empty one means no key."""
    if access is Access.OPEN:
        return []
    if access is Access.ADMIN and config.admin_api_keys:
        return [{ADMIN_KEY: []}]
    return [{API_KEY: []}] if config.api_keys else [{}, {API_KEY: []}]


def _schemes(config: ServerConfig) -> dict[str, Any]:
    schemes = {API_KEY: _bearer("A key of --api-key. The header x-api-key is taken too.")}
    if config.admin_api_keys:
        schemes[ADMIN_KEY] = _bearer("A key of --admin-api-key, for routes that change the server.")
    return schemes


def _bearer(description: str) -> dict[str, str]:
    return {"type": "http", "scheme": "bearer", "description": description}
