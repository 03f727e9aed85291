"""Long lists of numbers in JSON: the same values and the same refusals as by the plain parser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.api.http.json_body import parse_json
from mlx_parallm.api.nets import long_lists
from mlx_parallm.api.nets.bodies import ACT, PREDICT, Layout, read_body
from mlx_parallm.api.nets.long_lists import parse_with_arrays
from mlx_parallm.api.nets.oip.body import split_body
from mlx_parallm.api.nets.oip.schema import InferRequest
from mlx_parallm.api.nets.tensors import decoded
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object

JSON_TYPE = "application/json"
NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=True, allow_infinity=True),
    st.booleans(),
)
#: ``SEPARATORS``: of entries of lists, and of names and values.
SEPARATORS = [(",", ":"), (", ", ": "), (" ,\n\t", "\r: ")]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short lists be long ones, in pieces of a few numbers."""
    monkeypatch.setattr(long_lists, "LONG_BODY_BYTES", 0)
    monkeypatch.setattr(long_lists, "BLOCK_BYTES", 4)
    monkeypatch.setattr(long_lists, "MIN_BLOCKS", 1)
    monkeypatch.setattr(long_lists, "PIECE_BYTES", 10)
    monkeypatch.setattr(long_lists, "SLICE_BYTES", 16)


def places(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every member of every object."""
    if is_object(value):
        yield from ((value, key) for key in value)
    for inner in value.values() if is_object(value) else value if is_list(value) else ():
        yield from places(inner)


def outcome(read: Any) -> Any:
    """Return what a function returns, or how it refuses."""
    try:
        return read()
    except InvalidRequestError as refusal:
        return refusal.__class__, str(refusal), refusal.param, refusal.code


def assert_equal(value: Any, plain: Any) -> None:
    """Compare a value, in which lists may be arrays, with one that has none."""
    if isinstance(value, np.ndarray):
        wanted = decoded(plain, "x")
        assert value.dtype == wanted.dtype
        np.testing.assert_array_equal(value, wanted)
    elif is_object(value):
        assert list(value) == list(plain)
        for key, inner in value.items():
            assert_equal(inner, plain[key])
    elif is_list(value):
        assert len(value) == len(plain)
        for inner, other in zip(value, plain, strict=True):
            assert_equal(inner, other)
    else:
        assert repr(value) == repr(plain)


def compare(raw: bytes) -> Any:
    """Return the value of a text, which must be the plain parser's, and its refusals too."""
    value = outcome(lambda: parse_with_arrays(raw, places))
    assert_equal(value, outcome(lambda: parse_json(raw)))
    return value


@st.composite
def nested(draw: st.DrawFn, numbers: st.SearchStrategy[Any] = NUMBERS) -> Any:
    """Draw lists of equal lengths, of numbers that are mostly alike."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    size = int(np.prod(shape))
    kind = draw(st.sampled_from([numbers, st.integers(0, 255), st.floats(-9, 9), st.booleans()]))
    values = draw(st.lists(kind, min_size=size, max_size=size))
    for width in shape[:0:-1]:
        values = [values[begin : begin + width] for begin in range(0, len(values), width)]
    return values


TEXTS = st.text(max_size=8) | st.text('[],01 "\\', max_size=20)
VALUES = st.recursive(
    nested() | NUMBERS | st.none() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
#: ``CHANGES``: what takes the place of some bytes of a text.
CHANGES = ["", "[", "]", ",", "[]", "1", "-", ".", "e", " ", "0", '"', "],[", "][", ",,", "null"]
CHANGES += ["NaN", "true", "\\", "{", "é"]
FIELDS = ["inputs", "observations", "hidden_states", "action_mask", "episode_start", "actions"]
FIELDS += ["model", "seed", "outputs", "other", "sequence_id"]


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.sampled_from(SEPARATORS))
@settings(max_examples=100, deadline=None)
def test_any_value_is_the_plain_one(value: dict[str, Any], separators: tuple[str, str]) -> None:
    compare(json.dumps(value, separators=separators).encode())


def change_and_compare(value: Any, separators: tuple[str, str], data: st.DataObject) -> None:
    raw = bytearray(json.dumps({"x": value, "y": 1}, separators=separators).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        length = data.draw(st.integers(0, 2))
        change = data.draw(st.sampled_from(CHANGES))
        raw[place : place + length] = change.encode("latin-1")
    compare(bytes(raw))


@given(nested(), st.sampled_from(SEPARATORS), st.data())
@settings(max_examples=150, deadline=None)
def test_changed_texts_are_read_or_refused_alike(
    value: Any, separators: tuple[str, str], data: st.DataObject
) -> None:
    change_and_compare(value, separators, data)


@pytest.mark.slow
@given(nested(), st.sampled_from(SEPARATORS), st.data())
@settings(max_examples=1000, deadline=None)
def test_many_changed_texts_are_read_or_refused_alike(
    value: Any, separators: tuple[str, str], data: st.DataObject
) -> None:
    change_and_compare(value, separators, data)


@pytest.mark.parametrize("separators", SEPARATORS)
@pytest.mark.parametrize("shape", [(40,), (5, 8), (2, 3, 4, 5), (1, 1, 30), (30, 1)])
@pytest.mark.parametrize("dtype", ["int64", "float64", "bool"])
def test_lists_alike_become_arrays(
    separators: tuple[str, str], shape: tuple[int, ...], dtype: str
) -> None:
    array = np.random.default_rng(0).normal(scale=200, size=shape).astype(dtype)
    value = compare(json.dumps({"x": array.tolist(), "y": "z"}, separators=separators).encode())
    assert isinstance(value["x"], np.ndarray)
    assert value["x"].dtype == dtype


@pytest.mark.parametrize(
    "text",
    [
        '{"x": [1[], [2]], "y": 1}',
        '{"x": [[1], [2]3], "y": 1}',
        '{"x": [[1], [], [2]], "y": 1}',
        '{"x": [[1, 2], [3]], "y": 1}',
        '{"x": [[1, 2], 3, [4]], "y": 1}',
        '{"x": [[[1, 2]], [3, 4]], "y": 1}',
        '{"x": [1, 2, 3, 4, 5, 6], [7, 8, 9]}',
        '{"x": [1, 2, 3, 4, 5, 6,], "y": 1}',
        '{"x": [1, 2, 3, 4, 5 6], "y": 1}',
        '{"x": [1, 2, 03, 4, 5, 6], "y": 1}',
        '{"x": -[1, 2, 3, 4, 5, 6], "y": 1}',
        "{[1, 2, 3, 4, 5, 6, 7, 8]: 1}",
        '{"x": "a: [1, 2, 3, 4, 5, 6, 7]"}',
        '{"x": "a\\"[1, 2, 3, 4, 5, 6, 7]"}',
        '{"x": [1, 2, 3, 4, 5, 6], "x": 7}',
        '{"x": [1, 2, 3, 4, 5, 6], "x": [7, 8, 9, 10, 11, 12]}',
        '{"x": [1, 2, 3, 18446744073709551615, 4, 5]}',
        '{"x": [1, 2, 3, null, 4, 5, 6, 7, 8]}',
        '{"x": [NaN, -Infinity, true, 1e400, -0, -0.0]}',
        f'{{"x": {"[" * 150}1{"]" * 150}}}',
        f'{{"x": {"[" * 250}1{"]" * 250}}}',
        "[[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]",
    ],
)
def test_unusual_texts_are_read_or_refused_alike(text: str) -> None:
    compare(text.encode())


@pytest.mark.parametrize("layout", [PREDICT, ACT])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("is_named", [True, False])
def test_arrays_are_where_a_body_has_tensors(layout: Layout, field: str, is_named: bool) -> None:
    value = [[1, 2, 3], [4, 5, 6]]
    raw = json.dumps({field: {"obs": value} if is_named else value}).encode()
    body = read_body(JSON_TYPE, raw, layout)
    tensor = body.fields[field]["obs"] if is_named else body.fields[field]
    groups = (layout.inputs, "hidden_states")
    has_array = field in groups if is_named else field in {layout.inputs, *layout.arrays}
    assert isinstance(tensor, np.ndarray) == has_array
    assert_equal(body.fields, json.loads(raw))


def test_parts_of_an_array_object_stay_lists() -> None:
    shape = {"__numpy__": "", "dtype": "<f4", "shape": [1, 2, 3, 4, 5, 6, 7, 8]}
    body = read_body(JSON_TYPE, json.dumps({"observations": shape}).encode(), ACT)
    assert body.fields["observations"] == shape


def test_inputs_of_the_protocol_have_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    # Shapes are no arrays: they are short.
    monkeypatch.setattr(long_lists, "MIN_BLOCKS", 4)
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [0.5] * 8}
    fields = split_body(json.dumps({"inputs": [tensor, tensor]}).encode(), None).fields
    assert isinstance(fields, InferRequest)
    for each in fields.inputs:
        assert isinstance(each.data, np.ndarray)
        assert each.shape == [2, 4]
    for wrong in ({"data": 5}, {"data": {"a": 1}}):
        with pytest.raises(InvalidRequestError, match="data"):
            split_body(json.dumps({"inputs": [tensor | wrong]}).encode(), None)


def test_no_call_of_the_parser_reads_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def from_json(raw: bytes) -> Any:
        lengths.append(len(raw))
        return json.loads(raw)

    monkeypatch.setattr(long_lists, "from_json", from_json)
    value = np.arange(3000).reshape(10, 300).tolist()
    compare(json.dumps({"x": value}).encode())
    assert len(lengths) > 100
    assert max(lengths) < 64
