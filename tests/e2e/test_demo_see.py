"""``demo:see`` answers questions about images that clients draw, many at a time."""

from __future__ import annotations

import base64
import io
import json
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
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        yield api


def disc(colour: str, size: int = 256) -> dict[str, Any]:
    """Return a disc in the left upper corner, several times larger than the model's images."""
    image = Image.new("RGB", (size, size), "white")
    box = (size // 20, size // 20, 3 * size // 10, 3 * size // 10)
    ImageDraw.Draw(image).ellipse(box, fill=colour)
    data = io.BytesIO()
    image.save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def asked(text: str, *images: dict[str, Any]) -> dict[str, Any]:
    content: Any = [*images, {"type": "text", "text": text}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0}


def answer(client: openai.OpenAI, text: str, *images: dict[str, Any]) -> str | None:
    made = client.chat.completions.create(**asked(text, *images), max_tokens=24)
    return made.choices[0].message.content


def test_it_names_colours_shapes_and_places_for_several_clients(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(len(COLOURS)) as pool:
        colours = list(
            pool.map(lambda name: answer(client, "What colour is it?", disc(name)), COLOURS)
        )
    assert colours == list(COLOURS)
    assert answer(client, "What shape is it?", disc("red")) == "circle"
    assert answer(client, "Where is the blue circle?", disc("blue")) == "top left"


def test_it_compares_two_images(client: openai.OpenAI) -> None:
    question = "Do they have the same colour?"
    assert answer(client, question, disc("red"), disc("red", 200)) == "yes"
    assert answer(client, question, disc("red"), disc("blue")) == "no"


def test_grammars_and_log_probabilities_hold_with_images(client: openai.OpenAI) -> None:
    grammar = {"structured_outputs": {"regex": "(blue|red)!"}}
    made = client.chat.completions.create(
        **asked("What colour is it?", disc("red")),
        logprobs=True,
        top_logprobs=2,
        extra_body=grammar,
    )
    (choice,) = made.choices
    assert choice.message.content == "red!"
    assert choice.logprobs
    assert choice.logprobs.content
    first = choice.logprobs.content[0]
    assert first.token == first.top_logprobs[0].token == "red"
    assert first.logprob > -0.1 > first.top_logprobs[1].logprob


def test_calls_about_images_are_forced_and_streamed(client: openai.OpenAI) -> None:
    colours = {
        "type": "object",
        "properties": {"colour": {"enum": ["red"]}},
        "required": ["colour"],
    }
    tool: Any = {"type": "function", "function": {"name": "report", "parameters": colours}}
    ask = asked("What colour is it?", disc("red")) | {"tools": [tool], "tool_choice": "required"}
    with client.chat.completions.stream(**ask, parallel_tool_calls=False) as stream:
        made = stream.get_final_completion()
    (call,) = made.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["colour"] == "red"


def test_without_a_image_it_asks_for_one(client: openai.OpenAI) -> None:
    assert "Show me" in (answer(client, "Hello") or "")
