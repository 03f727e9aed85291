"""Images of Python programs become URLs in the bodies of the client."""

from __future__ import annotations

import io
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlx_parallm.client.images import image_urls, with_image_urls

URL = "https://example.org/a.png"


def stored(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_a_file_is_sent_as_it_is(kind: str, tmp_path: Path) -> None:
    data = stored(kind)
    path = tmp_path / "image"
    path.write_bytes(data)
    urls = image_urls([data, bytearray(data), path, str(path)])
    head, _, body = urls[0].partition(",")
    assert head == f"data:image/{kind.lower()};base64"
    assert b64decode(body) == data
    assert set(urls) == {urls[0]}


def transparent() -> Image.Image:
    image = Image.new("P", (3, 2))
    image.info["transparency"] = 0
    return image


@pytest.mark.parametrize(
    ("image", "mode"),
    [
        (Image.new("RGB", (3, 2)), "RGB"),
        (Image.new("L", (3, 2)), "RGB"),
        (Image.new("CMYK", (3, 2)), "RGB"),
        (Image.new("LA", (3, 2)), "RGBA"),
        (transparent(), "RGBA"),
    ],
)
def test_an_image_of_pillow_becomes_a_png(image: Image.Image, mode: str) -> None:
    (url,) = image_urls([image])
    with Image.open(io.BytesIO(b64decode(url.partition(",")[2]))) as sent:
        assert (sent.format, sent.mode, sent.size) == ("PNG", mode, (3, 2))


def test_urls_and_other_parts_are_left_alone() -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    text = {"type": "text", "text": "x"}
    shown = [{"type": "image", "image": URL}, {"image": URL}]
    (message,) = with_image_urls([{"role": "user", "content": [part, text, *shown]}])
    assert message["content"] == [part, text, part, part]
    for prompt in ("a text", [1, 2], [{"role": "user", "content": "a text"}], {"text": "x"}):
        assert with_image_urls(prompt) == prompt


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"text": "x", "images": [URL, 3]}, r"images\[1\] has a int"),
        ({"text": "x", "images": [Image.new("F", (3, 2))]}, "more than 8 bits a colour"),
        ({"token_ids": [1], "images": ["/nowhere/x.png"]}, r"images\[0\] cannot be read"),
        ([{"role": "user", "content": [{"type": "image", "image": None}]}], r"content\[0\] has a"),
    ],
)
def test_what_is_no_image_is_named(prompt: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        with_image_urls(prompt)
