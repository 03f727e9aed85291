"""PDF files in a conversation: each becomes a document of images or texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_parallm.api.anthropic.contents import BREAK, PLACE
from mlx_parallm.api.anthropic.schema import InputMessage
from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.images import Images
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.media.pdf import MAX_PAGES, PdfRoom
from mlx_parallm.types.json_values import is_list, is_object

PDF = "application/pdf"
# FILES: kinds of sources of documents that are files.
FILES = ("base64", "url")


def media_sources(messages: Sequence[InputMessage]) -> Iterator[str]:
    """Yield the URLs and base64 of images and documents, each as often as the body has it."""
    for block in _media_blocks(messages):
        for name in ("data", "url"):
            value = block["source"][name].value
            if isinstance(value, str) and block["source"].type in ("base64", "url"):
                yield value


async def read_pdfs(
    messages: Sequence[InputMessage], model: GenerationModel, images: Images, max_chars: int
) -> bool:
    """Put the pages of each PDF file in its place: images where the model sees, else texts.

    Args:
        messages: of the body.
        model: reads them.
        images: reads files.
        max_chars: most characters of the texts of all files.

    Returns:
        True if there was a file: its texts may be far longer than the body.

    Raises:
        InvalidRequestError: a file is not read, has no text for a model that sees nothing, or
            the files have too much together.
    """
    blocks = list(_media_blocks(messages))
    files = [each for each in blocks if each.type == "document" and _kind(each) in FILES]
    room = PdfRoom(MAX_PAGES, max_chars)
    if model.images is not None:
        num_images = sum(block.type == "image" for block in blocks)
        room.pages = min(MAX_PAGES, images.pdfs.max_images - num_images)
    for block in files:
        content = await _read(block["source"], model, images, room)
        block.value["source"] = {"type": "content", "content": content}
    return bool(files)


def _kind(block: BodyValue) -> str:
    return block["source"].type


async def _read(source: BodyValue, model: GenerationModel, images: Images, room: PdfRoom) -> Any:
    is_url = source.type == "url"
    if not is_url and source["media_type"].filled_text() != PDF:
        raise source["media_type"].refusal(f"must be {PDF}")
    content = source["url" if is_url else "data"].filled_text()
    sees = model.images is not None
    pages = await images.pdfs.pages(
        content, is_url=is_url, as_images=sees, room=room, param=source.where
    )
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
