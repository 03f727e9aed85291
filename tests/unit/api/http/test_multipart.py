"""Forms that come in pieces, and what is no form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.http.multipart import MAX_FIELD_BYTES, MAX_PARTS, FormReader, base_name
from mlx_parallm.types.errors import InvalidRequestError

TYPE = "multipart/form-data; boundary=xyz"


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    label = f'; filename="{filename}"' if filename is not None else ""
    head = f'--xyz\r\nContent-Disposition: form-data; name="{name}"{label}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


def read(*pieces: bytes, content_type: str = TYPE) -> tuple[FormReader, bytes]:
    reader = FormReader(content_type, "file")
    data = b"".join(reader.feed(piece) for piece in pieces)
    reader.finish()
    return reader, data


CONTENT = b"a\r\n--xy\r\n--xyzz\n\x00\xff\r\n"
WHOLE = form(
    part("purpose", b"batch"),
    part("file", CONTENT, "d\u00e9j\u00e0.jsonl"),
    part("expires_after[seconds]", b"3600"),
)


def test_a_form_cut_anywhere_is_the_same_form() -> None:
    for cut in range(len(WHOLE) + 1):
        reader, data = read(WHOLE[:cut], WHOLE[cut:])
        assert data == CONTENT
        assert reader.filename == "d\u00e9j\u00e0.jsonl"
        assert reader.fields == {"purpose": "batch", "expires_after[seconds]": "3600"}


def test_parts_of_a_list_are_kept_in_order() -> None:
    parts = [part("a[]", b"1"), part("file", b"x", "x"), part("a[]", b"2"), part("a", b"3")]
    reader, _ = read(form(*parts))
    assert (reader.lists, reader.fields) == ({"a": ["1", "2"]}, {"a": "3"})


def test_a_form_cut_off_anywhere_is_told() -> None:
    for size in range(len(WHOLE) - 4):
        with pytest.raises(InvalidRequestError):
            read(WHOLE[:size])


@given(st.binary())
def test_any_bytes_are_a_form_or_a_bad_request(raw: bytes) -> None:
    for body in (raw, part("file", raw, "x") + raw, form(part("file", b"", "x"), raw)):
        try:
            read(body)
        except InvalidRequestError as refusal:
            assert str(refusal)  # noqa: PT017


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "middle"),
        (form(part("purpose", b"batch")), "no file"),
        (form(part("file", b"text")), "a file with a name"),
        (form(part("file", b"1", "a"), part("file", b"2", "b")), "several"),
        (form(part("x", b"y" * (MAX_FIELD_BYTES + 1)), part("file", b"", "a")), "at most"),
        (form(*[part("x", b"")] * MAX_PARTS, part("file", b"", "a")), "parts"),
        (b"--xyz\r\nX: y\r\n\r\n\r\n--xyz--\r\n", "no name"),
        (b"hello", "cannot be read"),
    ],
)
def test_what_is_wrong_is_told(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(body)


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300],
)
def test_another_type_is_refused_before_anything_is_read(content_type: str) -> None:
    with pytest.raises(InvalidRequestError):
        FormReader(content_type, "file")


def test_names_hold_nothing_that_breaks_a_header_or_a_log() -> None:
    assert base_name("a\r\nx-bad: 1\x00\u2028") == "a__x-bad: 1__"
    assert base_name("") == "file"
    assert len(base_name("x" * 5000)) == 255


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("/home/somebody/a.jsonl", "a.jsonl"),
        ("C:\\Users\\somebody\\a.jsonl", "a.jsonl"),
        ("a\\b/c\\d.jsonl", "d.jsonl"),
        ("folder/", "file"),
        ("..", "file"),
        ("a/..", "file"),
        (".", "file"),
        ("a\\. .", "file"),
        (" ", "file"),
        (".hidden", ".hidden"),
        ("a..b", "a..b"),
    ],
)
def test_files_have_no_folders(sent: str, kept: str) -> None:
    assert base_name(sent) == kept
    reader, _ = read(form(part("file", b"", sent.replace("\\", "\\\\"))))
    assert reader.filename == kept
