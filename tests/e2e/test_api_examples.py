"""Every operation of the OpenAPI document has an example, and a server answers it so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_parallm.api.app import SLICES, STORING_SLICES, examples_of
from mlx_parallm.api.http.openapi import EVENTS, Example, operations
from scripts.example_requests import ExampleSender, differences, ends_of, example_server

EXAMPLES = examples_of(SLICES + STORING_SLICES)
STREAMED = [key for key, example in EXAMPLES.items() if example.stream is not None]


@pytest.fixture(scope="module")
def sender() -> Iterator[ExampleSender]:
    with example_server() as (client, places):
        yield ExampleSender(client, EXAMPLES, places)


@pytest.fixture(scope="module")
def document(sender: ExampleSender) -> dict[str, Any]:
    return sender.client.get("/openapi.json").json()


def test_every_operation_has_an_example(document: dict[str, Any]) -> None:
    for key, operation in operations(document):
        assert list(missing(operation, EXAMPLES[key])) == [], key


def missing(operation: dict[str, Any], example: Example) -> Iterator[str]:
    """Yield the parts of an operation that have no example in the document."""
    for parameter in operation.get("parameters", ()):
        if parameter["required"] and "example" not in parameter:
            yield parameter["name"]
    bodies = operation.get("requestBody", {}).get("content", {})
    if bodies and not any("example" in body for body in bodies.values()):
        yield "body"
    answers = [response.get("content", {}) for response in operation["responses"].values()]
    is_empty = example.answer is not None and example.answer.media_type is None
    shown = any("example" in body for contents in answers for body in contents.values())
    if not (shown or is_empty):
        yield "answer"


@pytest.mark.parametrize("key", EXAMPLES)
def test_an_example_is_answered_as_it_was_recorded(key: str, sender: ExampleSender) -> None:
    expected, answer = EXAMPLES[key].answer, sender.send(key)
    assert expected is not None
    assert (answer.status, answer.media_type) == (expected.status, expected.media_type)
    assert list(differences(expected.body, answer.body)) == []
    assert (expected.status < 400) == (EXAMPLES[key].refused is None)


@pytest.mark.parametrize("key", STREAMED)
def test_a_stream_begins_and_ends_as_it_was_recorded(key: str, sender: ExampleSender) -> None:
    answer = sender.send(key, stream=True)
    assert answer.media_type == EVENTS
    assert list(differences(ends_of(EXAMPLES[key].events or ""), ends_of(answer.body))) == []
