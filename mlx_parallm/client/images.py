"""Images of rollouts: what a program has of them becomes URLs in a body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_parallm.media.image_file import image_url, kind_of
from mlx_parallm.types.json_values import is_list, is_mapping

#: ``ImageInput``: the bytes of a file, a path, a Pillow image, or a URL.
ImageInput = Any
_MESSAGES = ("messages", "append_messages")


def with_image_urls(prompt: Any) -> Any:
    """Return a prompt of a rollout with its images as URLs.

    Parts ``{"type": "image", "image": …}`` of messages, where the type may be missing, become
    OpenAI's ``image_url``.

    Raises:
        ValueError: an image is none, or cannot be read; the message names its place.
    """
    if is_mapping(prompt):
        item = dict(prompt)
        for name in _MESSAGES:
            if item.get(name) is not None:
                item[name] = [_message(message) for message in item[name]]
        return item | {"images": image_urls(item["images"])} if item.get("images") else item
    if isinstance(prompt, str) or not any(is_mapping(each) for each in prompt):
        return prompt
    return [_message(message) for message in prompt]


def image_urls(images: Sequence[ImageInput]) -> list[str]:
    """Return the URL of each image.

    Raises:
        ValueError: see ``with_image_urls``.
    """
    return [_url(image, f"images[{number}]") for number, image in enumerate(images)]


def _message(message: Any) -> Any:
    content = message.get("content") if is_mapping(message) else None
    if not is_mapping(message) or not is_list(content):
        return message
    return {**message, "content": [_part(part, place) for place, part in enumerate(content)]}


def _part(part: Any, place: int) -> Any:
    if not is_mapping(part) or kind_of(part) != "image" or "image" not in part:
        return part
    url = _url(part["image"], f"content[{place}]")
    return {"type": "image_url", "image_url": {"url": url}}


def _url(image: ImageInput, where: str) -> str:
    try:
        return image_url(image)
    except ValueError as problem:
        raise ValueError(f"{where} {problem}") from None
