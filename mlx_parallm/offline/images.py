"""Images in conversations of ``LLM.chat``, and in prompts of ``LLM.generate``."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.api.turns.images import (
    Images,
    ImageSource,
    image_part,
    image_sources,
    pixel_range_of,
)
from mlx_parallm.api.turns.written_prompts import read_prompt
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.processor import PIXELS_PARAM, PreparedImage
from mlx_parallm.images.prompt import Hide, ImagePrompt, Messages, image_prompt, text_prompt
from mlx_parallm.media.image_file import file_bytes, is_url, kind_of
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_mapping, is_sequence

# LIMITS: the program chooses its images itself, from any public host.
LIMITS = MediaLimits(allowed_domains=("*",))
# IMAGE, IMAGE_PIL, IMAGE_URL: the types of parts, which name the field that has the image too.
IMAGE, IMAGE_PIL, IMAGE_URL = "image", "image_pil", "image_url"
# PROMPT_FIELDS: of a prompt in vLLM's form.
TEXT, TOKEN_IDS, DATA = "prompt", "prompt_token_ids", "multi_modal_data"
PROMPT_FIELDS = frozenset({TEXT, TOKEN_IDS, DATA, PIXELS_PARAM})


def mapped_prompt(prompt: Mapping[str, Any], model: GenerationModel) -> ImagePrompt:
    """Return a prompt in vLLM's form as tokens and inputs.

    Args:
        prompt: has "prompt" or "prompt_token_ids", and may have "multi_modal_data" with an image,
            or a list of them, under "image", and "mm_processor_kwargs".
        model: reads it.

    Raises:
        InvalidRequestError: it has something else, or an image cannot be read.
    """
    unknown = sorted(set(prompt) - PROMPT_FIELDS)
    if unknown:
        raise InvalidRequestError(f"A prompt has no {unknown[0]!r}.", param=unknown[0])
    texts = [prompt[name] for name in (TEXT, TOKEN_IDS) if prompt.get(name) is not None]
    if len(texts) != 1:
        raise InvalidRequestError(f"A prompt needs {TEXT} or {TOKEN_IDS}.", param=TEXT)
    sources = _data_sources(prompt.get(DATA))
    shown = _prepared(sources, model, prompt.get(PIXELS_PARAM)) if sources else []
    return read_prompt(texts[0], shown, model)


def _data_sources(data: Any) -> list[ImageSource]:
    """Return the images of vLLM's ``multi_modal_data``."""
    if data is None:
        return []
    if not is_mapping(data) or set(data) - {IMAGE}:
        raise InvalidRequestError(f"{DATA} may have {IMAGE!r} only.", param=DATA)
    image: Any = data.get(IMAGE)
    images: Sequence[Any] = image if is_sequence(image) else [] if image is None else [image]
    return [_source(each, f"{DATA}.{IMAGE}[{place}]") for place, each in enumerate(images)]


def _prepared(
    sources: Sequence[ImageSource], model: GenerationModel, sizes: Mapping[str, Any] | None
) -> list[PreparedImage]:
    """Return images as the model takes them."""
    pixel_range = pixel_range_of(sizes)
    # The caller may be in a loop of its own, such as a notebook's.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(
            lambda: asyncio.run(Images(LIMITS).prepare(sources, model, pixel_range))
        ).result()


def chat_prompt(
    conversation: Sequence[Mapping[str, Any]],
    model: GenerationModel,
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> ImagePrompt:
    """Return a conversation as tokens and inputs.

    Args:
        conversation: parts of contents are texts, ``{"type": "image", "image": …}`` with bytes of a
            file, a path or a Pillow image (the type may be missing), vLLM's ``image_pil``, or
            OpenAI's ``image_url``; arguments of tool calls are objects, or texts as OpenAI's.
        model: reads it.
        sizes: vLLM's ``mm_processor_kwargs``.
        options: of the chat template.

    Raises:
        InvalidRequestError: the model takes no images, or one cannot be read.
    """

    def render(shown: Messages, hide: Hide) -> str:
        return model.tokenizer.render_chat(shown, **hide(options))

    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    parted = [_message(message, number) for number, message in enumerate(conversation)]
    messages = template_messages(parted, id_length=model.call_id_length)
    sources, form = image_sources(messages), model.images
    if not sources:
        texts = [*map(_joined, messages)]
        return text_prompt(texts, form, render=render, encode=encode, marks=model.turn_marks)
    prepared = _prepared(sources, model, sizes)
    assert form is not None, "a model without images has refused them"
    return image_prompt(
        messages, prepared, form, render=render, encode=encode, marks=model.turn_marks
    )


def _message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    content = message.get("content")
    if not is_list(content):
        return dict(message)
    places = (f"messages[{number}].content[{index}]" for index in range(len(content)))
    parts = [_part(part, place) for part, place in zip(content, places, strict=True)]
    return {**message, "content": parts}


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content, if it has parts, is the text of these."""
    content = message.get("content")
    if not is_list(content):
        return message
    return {**message, "content": "".join(str(part["text"]) for part in content)}


def _part(part: Any, param: str) -> dict[str, Any]:
    kind = kind_of(part) if is_mapping(part) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return dict(part)
    if kind == IMAGE_URL:
        url = part.get(IMAGE_URL)
        url = url.get("url") if is_mapping(url) else url
        if isinstance(url, str):
            return image_part(ImageSource(param=param, url=url))
    if kind in (IMAGE, IMAGE_PIL):
        return image_part(_source(part.get(kind), param))
    raise InvalidRequestError(
        f"{param} is neither a text nor an image: its type is {str(kind)[:40]!r}.", param=param
    )


def _source(image: Any, param: str) -> ImageSource:
    if is_url(image):
        return ImageSource(param=param, url=image)
    try:
        data = file_bytes(image)
    except ValueError as problem:
        raise InvalidRequestError(f"{param} {problem}", param=param) from None
    return ImageSource(param=param, url=b64encode(data).decode(), is_base64=True)
