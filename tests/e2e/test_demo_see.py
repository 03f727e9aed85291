"""``demo:see`` answers questions about pictures that clients draw, many at a time."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from PIL import Image, ImageDraw

from tests.server_process import ServerProcess

MODEL = "demo:see"
COLOURS = ("red", "blue", "green", "orange")


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    process = ServerProcess("--model", MODEL)
    process.wait_until_ready()
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none") as api:
        yield api
    process.stop()


def disc(colour: str, size: int = 256) -> dict[str, Any]:
    """Return a disc in the left upper corner, several times larger than the model's pictures."""
    picture = Image.new("RGB", (size, size), "white")
    box = (size // 20, size // 20, 3 * size // 10, 3 * size // 10)
    ImageDraw.Draw(picture).ellipse(box, fill=colour)
    data = io.BytesIO()
    picture.save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def answer(client: openai.OpenAI, text: str, *pictures: dict[str, Any]) -> str | None:
    content: Any = [*pictures, {"type": "text", "text": text}]
    made = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=24, temperature=0
    )
    return made.choices[0].message.content


def test_it_names_colours_shapes_and_places_for_several_clients(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(len(COLOURS)) as pool:
        colours = list(
            pool.map(lambda name: answer(client, "What colour is it?", disc(name)), COLOURS)
        )
    assert colours == list(COLOURS)
    assert answer(client, "What shape is it?", disc("red")) == "circle"
    assert answer(client, "Where is the blue circle?", disc("blue")) == "top left"


def test_it_compares_two_pictures(client: openai.OpenAI) -> None:
    question = "Do they have the same colour?"
    assert answer(client, question, disc("red"), disc("red", 200)) == "yes"
    assert answer(client, question, disc("red"), disc("blue")) == "no"


def test_without_a_picture_it_asks_for_one(client: openai.OpenAI) -> None:
    assert "picture" in (answer(client, "Hello") or "")
