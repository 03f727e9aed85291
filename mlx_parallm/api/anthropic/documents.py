"""PDF files in a conversation: each becomes a document of images or texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_parallm.api.anthropic.contents import BREAK, PLACE
from mlx_parallm.api.anthropic.schema import InputMessage
from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.images import Images
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.types.json_values import is_list, is_object

PDF = "application/pdf"


def media_sources(messages: Sequence[InputMessage]) -> Iterator[str]:
    """Yield the URLs and base64 of images and documents, each as often as the body has it."""
    for block in _media_blocks(messages):
        for name in ("data", "url"):
            value = block["source"][name].value
            if isinstance(value, str) and block["source"].type in ("base64", "url"):
                yield value


async def read_pdfs(
    messages: Sequence[InputMessage], model: GenerationModel, images: Images
) -> None:
    """Put the pages of each PDF file in its place: images where the model sees, else texts.

    Raises:
        InvalidRequestError: a file is not read, or has no text for a model that sees nothing.
    """
    for block in _media_blocks(messages):
        source = block["source"]
        if block.type == "document" and source.type in ("base64", "url"):
            block.value["source"] = {
                "type": "content",
                "content": await _read(source, model, images),
            }


async def _read(source: BodyValue, model: GenerationModel, images: Images) -> Any:
    is_url = source.type == "url"
    if not is_url and source["media_type"].filled_text() != PDF:
        raise source["media_type"].refusal(f"must be {PDF}")
    content = source["url" if is_url else "data"].filled_text()
    sees = model.images is not None
    pages = await images.pdfs.pages(content, is_url=is_url, as_images=sees, param=source.where)
    if sees:
        return [_image_block(page) for page in pages]
    if not any(pages):
        raise source.refusal("is a PDF file without text, and the model does not take images")
    return BREAK.join(pages)


def _image_block(page: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": page}
    return {"type": "image", "source": source}


def _media_blocks(messages: Sequence[InputMessage]) -> Iterator[BodyValue]:
    for number, message in enumerate(messages):
        yield from _within(BodyValue(message.content, f"messages.{number}.content"))


def _within(content: BodyValue) -> Iterator[BodyValue]:
    """Yield the images and documents of a content, also in results and in documents."""
    if is_list(content.value):
        for entry in content.entries(form=PLACE):
            yield from _within(entry)
    elif is_object(content.value):
        if content.type in ("image", "document"):
            yield content
        yield from _within(content["content"])
        yield from _within(content["source"]["content"])
