"""What a request's path says: where it is behind a proxy, and whose protocol it speaks."""

from __future__ import annotations

from starlette.types import Scope

MESSAGES = "/messages"
SGLANG_PATHS = frozenset(
    {
        "/continue_generation",
        "/load_lora_adapter",
        "/load_lora_adapter_from_tensors",
        "/pause_generation",
        "/destroy_weights_update_group",
        "/init_weights_update_group",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_lora",
        "/update_weights_from_tensor",
        "/weights_checker",
    }
)


def local_path(scope: Scope) -> str:
    """The path without the prefix that a proxy in front strips (``--root-path``)."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the path belongs to Anthropic's API; every other one is OpenAI's or this server's."""
    path = local_path(scope).removeprefix("/v1")
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def id_headers(scope: Scope) -> dict[str, str]:
    """The headers that tell a request's id, if it has one yet."""
    request_id = scope.get("state", {}).get("request_id")
    if request_id is None:
        return {}
    headers = {"x-request-id": request_id}
    return headers | {"request-id": request_id} if speaks_anthropic(scope) else headers


def speaks_sglang(scope: Scope) -> bool:
    """Whether the path is one of SGLang's control, whose clients read ``success``."""
    return local_path(scope) in SGLANG_PATHS
