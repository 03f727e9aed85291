"""JSON bodies that are read, and bodies that are refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.http.json_body import (
    HALF_PAIR,
    TOO_DEEP,
    parse_json,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import MAX_ENTRIES, MAX_VALUES, TOO_MANY

MAX_DEPTH = 200

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.booleans())
def test_every_value_is_read_as_python_reads_it(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    parsed = parse_json(text.encode())
    assert parsed == json.loads(text)
    assert json.dumps(parsed, ensure_ascii=ascii_only) == text


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
def test_nesting_has_a_limit(opens: str, closes: str) -> None:
    value = parse_json((opens * MAX_DEPTH + "1" + closes * MAX_DEPTH).encode())
    for _ in range(MAX_DEPTH):
        value = value[0] if isinstance(value, list) else value["a"]
    assert value == 1
    for depth in (MAX_DEPTH + 1, 1_000_000):
        with pytest.raises(InvalidRequestError, match=TOO_DEEP):
            parse_json((opens * depth + "1" + closes * depth).encode())


@pytest.mark.parametrize(
    "text", ["\ud800", "a\udfff", "\udc00b", "\ud800\ud800", "\ud800\n", "\ud83d\\"]
)
@pytest.mark.parametrize("is_key", [False, True])
def test_half_a_surrogate_pair_is_refused(text: str, is_key: bool) -> None:
    raw = json.dumps({text: 1} if is_key else [text]).encode()
    with pytest.raises(InvalidRequestError, match=HALF_PAIR):
        parse_json(raw)


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{]", b"[1,]", b"1 2", b"nul", b"'a'", b'"\n"', b'"\\uzzzz"', b"9" * 5000),
        *(b'"\xff"', b"\xef\xbb\xbf{}", "{}".encode("utf-16")),
    ],
)
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"^The body is not JSON: ") as refusal:
        parse_json(raw)
    assert refusal.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("value", "most"),
    [("[]", MAX_VALUES - 1), ("{}", MAX_VALUES - 1), ("1", MAX_ENTRIES + 1), ('""', MAX_ENTRIES)],
)
def test_a_list_may_have_so_many_entries(value: str, most: int) -> None:
    assert len(parse_json(f"[{','.join([value] * most)}]".encode())) == most
    with pytest.raises(InvalidRequestError, match=TOO_MANY):
        parse_json(f"[{','.join([value] * (most + 2))}]".encode())


def test_an_object_may_have_so_many_members() -> None:
    members = [f'"{number}":0' for number in range(MAX_VALUES + 1)]
    assert len(parse_json(f"{{{','.join(members[1:])}}}".encode())) == MAX_VALUES
    with pytest.raises(InvalidRequestError, match=TOO_MANY):
        parse_json(f"{{{','.join(members)}}}".encode())


@pytest.mark.parametrize("text", ["[", "{", ":", ",", '"[', '\\"[', '\\\\"{', "\u20ac:["])
def test_texts_may_hold_any_number_of_brackets(text: str) -> None:
    value = [text * (MAX_ENTRIES + 1), "]"]
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("raw", [b'"' + b":" * MAX_VALUES * 2, b":" * MAX_VALUES * 2])
def test_many_signs_alone_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_json(raw)
