"""Reads a PDF file, in a process of its own.

Scripts in a file are not run. The answer is JSON with ``pages`` or ``error``.
"""

from __future__ import annotations

import io
import json
import math
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

# SIDE: longest side of a page's image in pixels; SCALE: most pixels per point, 144 a inch.
SIDE = 1568
SCALE = 2.0
# ROUNDING: room for sides that are rounded up.
ROUNDING = 0.98
# MOST_CHARS: of the text of a page.
MOST_CHARS = 8_000_000
# PASSWORD: PDFium's code of a file that is encrypted with a password.
PASSWORD = 4


class RefusedError(Exception):
    """The file is not read; the message says why."""


def answer(data: bytes, output: BinaryIO, **request: Any) -> None:
    """Answer a request with the arguments of ``_pages``."""
    try:
        content: dict[str, Any] = {"pages": _pages(data, **request)}
    except RefusedError as refusal:
        content = {"error": str(refusal)}
    output.write(json.dumps(content).encode())


def _pages(
    data: bytes, as_images: bool, max_pages: int, max_pixels: int, max_chars: int
) -> list[str]:
    """Return the pages as images of at most ``max_pixels``, or as texts.

    All of them have at most ``max_chars``, images in base64.
    """
    # The server itself never loads it.
    import pypdfium2  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    try:
        document = pypdfium2.PdfDocument(data)
        num_pages = len(document)
        if not num_pages:
            raise RefusedError("The PDF file has no pages.")
        if num_pages > max_pages:
            raise RefusedError(
                f"The PDF file has {num_pages} pages; at most {max(0, max_pages)} are allowed "
                "here, beside the request's other files and images."
            )
        pages = (document[number] for number in range(num_pages))
        read = partial(_image, max_pixels=max_pixels) if as_images else _text
        return list(_within(map(read, pages), max_chars))
    except pypdfium2.PdfiumError as problem:
        if getattr(problem, "err_code", None) == PASSWORD:
            raise RefusedError("The PDF file is encrypted with a password.") from None
        raise RefusedError("The PDF file is truncated or damaged.") from None


def _within(pages: Iterator[str], left: int) -> Iterator[str]:
    for page in pages:
        left -= len(page)
        if left < 0:
            raise RefusedError("The pages of the PDF file are too large together.")
        yield page


def _image(page: Any, max_pixels: int) -> str:
    """Return a page as a PNG file in base64."""
    width, height = page.get_size()
    room = math.sqrt(max_pixels / max(1.0, width * height)) * ROUNDING
    scale = min(SCALE, SIDE / max(1.0, width, height), room)
    content = io.BytesIO()
    page.render(scale=scale, may_draw_forms=False).to_pil().convert("RGB").save(content, "PNG")
    page.close()
    return b64encode(content.getvalue()).decode()


def _text(page: Any) -> str:
    """Return the text layer of a page."""
    text = page.get_textpage()
    if text.count_chars() > MOST_CHARS:
        raise RefusedError("The PDF file has too much text.")
    # Half a surrogate pair is no character.
    words = text.get_text_range().encode("utf-8", "replace").decode()
    page.close()
    return words.replace("\r\n", "\n").strip()
