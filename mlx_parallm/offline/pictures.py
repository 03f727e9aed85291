"""Pictures in conversations of ``LLM.chat``."""

from __future__ import annotations

import asyncio
import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.api.turns.pictures import Pictures, PictureSource, picture_part, picture_sources
from mlx_parallm.config import MediaLimits
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pictures.prompt import PicturePrompt, picture_prompt
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_mapping

# LIMITS: the program chooses its pictures itself, from any public host.
LIMITS = MediaLimits(allowed_domains=("*",))
# IMAGE, IMAGE_PIL, IMAGE_URL: the types of parts, which name the field that has the picture too.
IMAGE, IMAGE_PIL, IMAGE_URL = "image", "image_pil", "image_url"


def _has_pictures(conversation: Sequence[Mapping[str, Any]]) -> bool:
    """True if a message has a part that is no text."""
    contents = [message.get("content") for message in conversation]
    return any(
        is_mapping(part) and part.get("type") != "text"
        for content in contents
        if is_list(content)
        for part in content
    )


def prompt_with_pictures(
    conversation: Sequence[Mapping[str, Any]], model: GenerationModel, **options: Any
) -> PicturePrompt | None:
    """Return a conversation as tokens and inputs; None if it has no pictures.

    Args:
        conversation: parts of contents are texts, ``{"type": "image", "image": …}`` with bytes of a
            file, a path or a Pillow image, vLLM's ``image_pil``, or OpenAI's ``image_url``.
        model: reads it.
        options: of the chat template.

    Raises:
        InvalidRequestError: the model takes no pictures, or one cannot be read.
    """
    if not _has_pictures(conversation):
        return None
    messages = [_message(message, number) for number, message in enumerate(conversation)]
    # The caller may be in a loop of its own, such as a notebook's.
    with ThreadPoolExecutor(1) as thread:
        prepared = thread.submit(
            lambda: asyncio.run(Pictures(LIMITS).prepare(picture_sources(messages), model))
        ).result()
    form = model.pictures
    assert form is not None, "a model without pictures has refused them"
    return picture_prompt(
        messages,
        prepared,
        form,
        render=partial(model.tokenizer.render_chat, **options),
        encode=partial(model.tokenizer.encode, add_special_tokens=False),
    )


def _message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    content = message.get("content")
    if not is_list(content):
        return dict(message)
    places = (f"messages[{number}].content[{index}]" for index in range(len(content)))
    parts = [_part(part, place) for part, place in zip(content, places, strict=True)]
    return {**message, "content": parts}


def _part(part: Any, param: str) -> dict[str, Any]:
    kind = part.get("type") if is_mapping(part) else None
    if kind == "text":
        return dict(part)
    if kind == IMAGE_URL:
        url = part.get(IMAGE_URL)
        url = url.get("url") if is_mapping(url) else url
        if isinstance(url, str):
            return picture_part(PictureSource(param=param, url=url))
    if kind in (IMAGE, IMAGE_PIL):
        data = _bytes_of(part.get(kind), param)
        source = PictureSource(param=param, url=b64encode(data).decode(), is_base64=True)
        return picture_part(source)
    raise InvalidRequestError(
        f"{param} is neither a text nor a picture: its type is {str(kind)[:40]!r}.", param=param
    )


def _bytes_of(image: Any, param: str) -> bytes:
    """Return the file of a picture."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as problem:
            raise InvalidRequestError(f"{param} cannot be read: {problem}", param=param) from None
    if callable(getattr(image, "save", None)):
        content = io.BytesIO()
        is_clear = "A" in image.getbands() or "transparency" in image.info
        image.convert("RGBA" if is_clear else "RGB").save(content, "PNG")
        return content.getvalue()
    raise InvalidRequestError(
        f"{param} has a {type(image).__name__}; give bytes, a path or a Pillow image.", param=param
    )
