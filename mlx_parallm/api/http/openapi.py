"""The OpenAPI document: FastAPI's, with groups and the keys that operations need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from typing import Any

from pydantic import TypeAdapter

from mlx_parallm.api.http.declared import Access
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.json_values import is_object

# FILE_NAME: in the folder of a slice, its examples by "METHOD path".
FILE_NAME = "examples.json"
JSON = "application/json"
FORM = "multipart/form-data"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRequest:
    """A client's request.

    Attributes:
        path: values of the path's parameters.
        query: values of the query's parameters.
        json: a JSON body; None if there is none.
        form: the fields of a multipart body; a file is an object of ``filename`` and of
            ``text`` or ``base64``.
    """

    path: Mapping[str, str] = field(default_factory=dict[str, str])
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    json: Any = None
    form: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleAnswer:
    """The server's answer.

    Attributes:
        status: the HTTP status.
        media_type: the body's; None if there is no body.
        body: a JSON value, or a text.
    """

    status: int
    media_type: str | None = None
    body: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A request of an operation, and its answer.

    Attributes:
        request: the request.
        answer: the answer; None before the first recording.
        stream: changes of the request that make its answer a stream; None if none is shown.
        events: the answer as a stream.
        until: fields of the final answer; the request is repeated until the answer has them.
        needs: operations whose examples are sent first; this one uses the ids of their answers.
        undo: operations whose examples are sent afterwards, without their own ``needs``.
        refused: the reason why the embedded models can only refuse it; None if they answer.
    """

    request: ExampleRequest = ExampleRequest()
    answer: ExampleAnswer | None = None
    stream: Mapping[str, Any] | None = None
    events: str | None = None
    until: Mapping[str, Any] = field(default_factory=dict[str, Any])
    needs: tuple[str, ...] = ()
    undo: tuple[str, ...] = ()
    refused: str | None = None


def read_examples(folders: Iterable[Traversable]) -> dict[str, Example]:
    """Return the examples of these folders by "METHOD path"."""
    examples: dict[str, Example] = {}
    for folder in folders:
        file = folder / FILE_NAME
        if file.is_file():
            examples |= parse_examples(file.read_bytes())
    return examples


def parse_examples(content: bytes) -> dict[str, Example]:
    """Return the examples in the content of a file."""
    return TypeAdapter(dict[str, Example]).validate_json(content)


def add_examples(document: dict[str, Any], examples: Mapping[str, Example]) -> None:
    """Write examples into an OpenAPI document, where its operations have their bodies."""
    for key, operation in operations(document):
        example = examples.get(key)
        if example is not None:
            _add_request(operation, example.request)
            _add_answer(operation, example)


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the operations of an OpenAPI document with their "METHOD path"."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def _add_request(operation: dict[str, Any], request: ExampleRequest) -> None:
    values = {"path": request.path, "query": request.query}
    for parameter in operation.get("parameters", ()):
        if parameter["name"] in values.get(parameter["in"], {}):
            parameter["example"] = values[parameter["in"]][parameter["name"]]
    contents = operation.get("requestBody", {}).get("content", {})
    for media_type, body in ((JSON, request.json), (FORM, request.form)):
        if body is not None and media_type in contents:
            contents[media_type]["example"] = form_example(body) if media_type == FORM else body


def form_example(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a form with the content of its files, or the names of those of bytes."""
    return {
        name: value.get("text", value["filename"]) if is_object(value) else value
        for name, value in form.items()
    }


def _add_answer(operation: dict[str, Any], example: Example) -> None:
    answer, responses = example.answer, operation["responses"]
    if answer is None or answer.media_type is None:
        return
    status = str(answer.status)
    response = responses.get(status) or responses.setdefault(f"{status[0]}XX", {"description": ""})
    contents = response.setdefault("content", {})
    contents.setdefault(answer.media_type, {})["example"] = answer.body
    if example.events is not None:
        contents.setdefault(EVENTS, {})["example"] = example.events


CHAT = "chat"
AUDIO = "audio"
POOLING = "embeddings and scores"
TOKENS = "tokens and templates"
FILES = "files and batches"
RL = "reinforcement learning"
NETS = "nets and policies"
SERVER = "server"
# CONTROL: the group of routes that need the admin key.
CONTROL = "control"
# GROUPS: descriptions of groups, in the order of /docs.
GROUPS = {
    CHAT: "Text of models that generate, in the forms of several APIs.",
    AUDIO: "Speech to text.",
    POOLING: "What models read: vectors, classes, scores, rewards.",
    TOKENS: "Texts to tokens and back, and what chat templates make of messages.",
    FILES: "Files, and batches of requests that are answered in the background.",
    RL: "Rollouts and log-probabilities for trainers.",
    NETS: "Outputs of small nets, and actions of policies.",
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
