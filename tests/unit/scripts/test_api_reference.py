"""The examples of the API: how they are recorded and compared; and the page made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_parallm.api.http.openapi import parse_examples
from scripts.api_reference import anchor, render
from scripts.compact_json import compact_json
from scripts.example_requests import (
    TIME,
    Exchange,
    differences,
    ends_of,
    recorded,
    recorded_events,
)
from scripts.write_api_reference import TARGET

FILE = f"file-{'a' * 32}"


def test_the_page_is_up_to_date() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_ids_times_and_durations_are_recorded_as_fixed_ones() -> None:
    answer = {"id": FILE, "of": [FILE, f"file-{'b' * 32}"], "created_at": 5, "expires_at": None}
    assert recorded(answer, Exchange()) == {
        "id": f"file-{1:032x}",
        "of": [f"file-{1:032x}", f"file-{2:032x}"],
        "created_at": TIME,
        "expires_at": None,
    }


def test_a_stream_is_recorded_without_its_middle() -> None:
    text = "".join(f'event: e\ndata: {{"n": {n}}}\n\n' for n in range(9))
    events = recorded_events(text, Exchange())
    assert ends_of(events) == [{"n": 0}, {"n": 8}]
    assert events.count("data:") == 5


@pytest.mark.parametrize(
    ("expected", "actual", "count"),
    [
        ({"a": 1}, {"a": 2.5}, 0),
        ({"a": 1}, {"a": True}, 1),
        ({"a": 1}, {"a": None}, 1),
        ({"a": 1}, {"b": 1}, 2),
        ([1], [2, 3], 0),
        ([1], [], 1),
        ([{"a": 1}, {"b": 1}], [{"b": 2}], 0),
        ([{"a": 1}], [{"a": "x"}], 1),
    ],
)
def test_an_answer_is_compared_by_its_shape(expected: Any, actual: Any, count: int) -> None:
    assert len(list(differences(expected, actual))) == count


def test_an_example_is_read_from_its_json() -> None:
    content = b'{"GET /b/{id}": {"request": {"path": {"id": "x"}}, "needs": ["POST /a"]}}'
    example = parse_examples(content)["GET /b/{id}"]
    assert (example.request.path, example.needs, example.answer) == (
        {"id": "x"},
        ("POST /a",),
        None,
    )


def test_json_that_fits_stands_in_a_line() -> None:
    value = {"short": [1, 2], "long": ["x" * 50, "y" * 50], "empty": {}}
    text = compact_json(value)
    assert json.loads(text) == value
    assert '"short": [1, 2]' in text
    assert max(map(len, text.splitlines())) <= 96


def test_anchors_are_those_of_github() -> None:
    assert anchor("GET /v1/files/{file_id}") == "get-v1filesfile_id"
