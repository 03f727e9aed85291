"""Long arrays are written in pieces, and as they would be in one call."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from pydantic_core import to_json

from mlx_parallm.api.nets import long_answers
from mlx_parallm.api.nets.long_answers import PIECE_NUMBERS, json_with_arrays, num_numbers

SHAPES = [
    (),
    (0,),
    (3, 0),
    (0, 2**20),
    (PIECE_NUMBERS,),
    (PIECE_NUMBERS + 1,),
    (1, 1, PIECE_NUMBERS + 1),
    (3, 2 * PIECE_NUMBERS + 1),
    (3000, 3),
    (2, 5, 1000),
    (5000, 1, 0),
]


def array_of(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    numbers = np.random.default_rng(0).normal(size=math.prod(shape)) * 100
    return numbers.reshape(shape).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_pieces_make_the_text_of_one_call(shape: tuple[int, ...], dtype: str) -> None:
    array = array_of(shape, dtype)
    text = json_with_arrays({"a": array, "b": {"c": array, "d": [1]}, "e": "x"})
    lists = array.tolist()
    assert text == to_json({"a": lists, "b": {"c": lists, "d": [1]}, "e": "x"})


def test_numbers_that_json_lacks_are_null() -> None:
    array = array_of((2 * PIECE_NUMBERS,))
    array[[0, PIECE_NUMBERS, -1]] = math.nan, math.inf, -math.inf
    read = json.loads(json_with_arrays([array]))[0]
    assert [read[place] for place in (0, PIECE_NUMBERS, -1)] == [None] * 3
    assert read.count(None) == 3


def test_no_call_writes_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def noted(value: Any, **options: Any) -> bytes:
        text = to_json(value, **options)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(long_answers, "to_json", noted)
    for shape in SHAPES:
        json_with_arrays({"a": np.ones(shape, bool)})
    # "true,", and the brackets of rows.
    assert max(lengths) <= PIECE_NUMBERS * len("[true],")


def test_all_arrays_are_counted() -> None:
    states = {"h": np.zeros((2, 3)), "c": np.zeros(4)}
    assert num_numbers({"a": np.zeros(5), "new_hidden_states": states, "model": "m"}) == 15
