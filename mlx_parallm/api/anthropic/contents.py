"""From content blocks that users and tools write to texts and images."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.images import ImageSource, image_part
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_mapping

# Between texts that a client keeps apart; the assistant's own are pieces of one.
BREAK = "\n\n"
# How the place of an entry of a list is written.
PLACE = "{where}.{number}"
BLOCKS = "must be a text or a list of blocks"
# OPAQUE: how keys begin whose values only Anthropic can read.
OPAQUE = "encrypted_"

#: ``Content``: of a message: a text, or parts if there are images.
Content = str | list[dict[str, Any]]
Reader = Callable[[BodyValue], Content]


def joined(first: Content, second: Content, between: str) -> Content:
    """Return two contents as one: a text, or parts if there are images."""
    if isinstance(first, str) and isinstance(second, str):
        return between.join(text for text in (first, second) if text)
    return [*_parts(first), *_parts(second)]


def check_type(block: BodyValue, known: Collection[str]) -> None:
    """Refuse a block whose type is not among those known here.

    Raises:
        InvalidRequestError: it is of another type, or of none.
    """
    if isinstance(block.type, str) and block.type in known:
        return
    kind = f"of type {block.type[:64]!r}" if isinstance(block.type, str) else "without a type"
    raise InvalidRequestError(
        f"{block.where}: a block {kind} is not supported here, only {', '.join(known)}.",
        param=block.where,
        code="unsupported_parameter",
    )


def texts_of(content: BodyValue) -> list[str]:
    """Return a text, or those of blocks that are all of type text."""
    if isinstance(content.value, str):
        return [content.value]
    blocks = content.entries(form=PLACE, what=BLOCKS)
    for block in blocks:
        check_type(block, ("text",))
    return [block["text"].text() for block in blocks]


def result_content(content: BodyValue, start: str = "") -> Content:
    """Return the content of a tool's result behind ``start``."""
    return _contents(content, RESULTS, start) if content.value else start


def server_result(content: BodyValue) -> Content:
    """Return the result of a tool that Anthropic ran, as JSON without what only it can read.

    A fetched document is read as any other.
    """
    if content.type == "web_fetch_result":
        return joined(content["url"].filled_text(), read_document(content["content"]), "\n")
    value: Any = content.value
    if is_list(value):
        return _json([_readable(entry) for entry in value])
    return _json(_readable(content.object().value))


def read_text(block: BodyValue) -> Content:
    """Return the text of a block."""
    return block["text"].text()


def read_image(block: BodyValue) -> Content:
    """Return the image of a block."""
    source = block["source"].object()
    if source.type == "base64":
        media_type, data = source["media_type"].filled_text(), source["data"].filled_text()
        image = ImageSource(param=source.where, url=data, is_base64=True, media_type=media_type)
    elif source.type == "url":
        image = ImageSource(param=source.where, url=source["url"].filled_text())
    else:
        raise source["type"].refusal("must be base64 or url")
    return [image_part(image)]


def read_document(block: BodyValue) -> Content:
    """Return a document between tags, which is how Anthropic's models are shown texts."""
    check_type(block, ("document",))
    source = block["source"].object()
    match source.type:
        case "text":
            content: Content = source["data"].text()
        case "content":
            content = _contents(source["content"], {"text": read_text, "image": read_image})
        case "file":
            raise source.refusal("is a file by its id, which is not read", unsupported=True)
        case _:
            raise source["type"].refusal("must be text, content, base64 or url")
    heads = {name: block[name].optional_text() for name in ("title", "context")}
    return _tagged("document", heads, content)


def read_search_result(block: BodyValue) -> Content:
    """Return a search result between tags."""
    heads = {name: block[name].filled_text() for name in ("title", "source")}
    return _tagged("search_result", heads, BREAK.join(texts_of(block["content"])))


def read_tool_reference(block: BodyValue) -> Content:
    """Return what a search for tools says: all tools of a request are in its prompt anyway."""
    return f"The tool {block['tool_name'].filled_text()} is available."


#: ``USERS``, ``RESULTS``: readers of the blocks that users write, and of those in tools' results.
USERS: Mapping[str, Reader] = {
    "text": read_text,
    "image": read_image,
    "document": read_document,
    "search_result": read_search_result,
}
RESULTS: Mapping[str, Reader] = {**USERS, "tool_reference": read_tool_reference}


def _contents(content: BodyValue, readers: Mapping[str, Reader], start: str = "") -> Content:
    """Return the contents of a text or of blocks, those of texts with a break between."""
    if isinstance(content.value, str):
        return start + content.value
    blocks = content.entries(form=PLACE, what=BLOCKS)
    for block in blocks:
        check_type(block, readers)
    contents = [readers[block.type](block) for block in blocks]
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return start + BREAK.join(texts)
    return [part for each in (start, *contents) for part in _parts(each)]


def _tagged(tag: str, heads: Mapping[str, str | None], content: Content) -> Content:
    lines = [f"<{name}>{value}</{name}>" for name, value in heads.items() if value]
    start = "\n".join([f"<{tag}>", *lines, ""])
    return joined(joined(start, content, ""), f"\n</{tag}>", "")


def _parts(content: Content) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}] if content else []


def _readable(entry: Any) -> Any:
    if not is_mapping(entry):
        return entry
    return {key: value for key, value in entry.items() if not key.startswith(OPAQUE)}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
