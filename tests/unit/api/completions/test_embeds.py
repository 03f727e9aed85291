"""``prompt_embeds`` are rows of finite numbers of the model's width, and nothing else is read."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from mlx_parallm.api.completions.embeds import read_embeds
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import InputKind, ModelInput, Span
from tests.fakes import make_info

WIDTH = 8
INFO = make_info(input_width=WIDTH, input_kinds=(InputKind.PROMPT_EMBEDS,), max_model_len=64)


def npy(array: Any, *, allow_pickle: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=allow_pickle)
    return buffer.getvalue()


def read(data: bytes) -> ModelInput:
    return read_embeds(base64.b64encode(data).decode(), INFO)


def numbers(source: ModelInput) -> np.ndarray:
    array = source.arrays["rows"]
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


ROWS = np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH) / 7


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_both_formats_give_the_same_rows(dtype: str) -> None:
    rows = ROWS.astype(dtype)
    first, second = read(npy(rows)), read(save({"any": rows}))
    assert first == second
    assert first.span == Span(0, 3)
    assert first.nbytes == rows.nbytes
    assert np.array_equal(numbers(first), rows)


def test_bfloat16_is_read_as_the_float32_equal_to_it() -> None:
    bits = (ROWS.view(np.uint32) >> 16).astype(np.uint16)
    entry = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [0, bits.nbytes]}
    header = json.dumps({"rows": entry}).encode()
    values = numbers(read(len(header).to_bytes(8, "little") + header + bits.tobytes()))
    assert values.dtype == np.float32
    assert np.array_equal(values.view(np.uint32), (ROWS.view(np.uint32) >> 16) << 16)


def test_big_endian_and_column_order_are_read_by_value() -> None:
    for array in (ROWS.astype(">f4"), np.asfortranarray(ROWS)):
        assert read(npy(array)) == read(npy(ROWS))


def test_contents_differ_with_numbers_and_shapes() -> None:
    other = ROWS.copy()
    other[2, 5] = np.nextafter(other[2, 5], 9, dtype=np.float32)
    contents = {read(npy(rows)).content for rows in (ROWS, other, ROWS[:2])}
    assert len(contents) == 3


def nan_rows(number: float) -> np.ndarray:
    rows = ROWS.copy()
    rows[1, 2] = number
    return rows


class Evil:
    """Leaves a file behind where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (npy(nan_rows(np.nan)), "infinite or NaN"),
        (npy(nan_rows(-np.inf)), "infinite or NaN"),
        (npy(ROWS[:, :5]), r"shape \[3, 5\], not \[rows, 8\]"),
        (npy(ROWS[0]), r"shape \[8\]"),
        (npy(ROWS[None]), r"shape \[1, 3, 8\]"),
        (npy(ROWS[:0]), "has no rows"),
        (npy(np.zeros((64, WIDTH), np.float32)), "64 tokens together"),
        (npy(ROWS.astype(np.float64)), "float64"),
        (npy(ROWS.astype(np.int32)), "int32"),
        (npy(np.array([[{}]], dtype=object), allow_pickle=True), "is of object"),
        (npy(ROWS)[:-1], "no .npy file of numbers"),
        (npy(ROWS)[:9], "no .npy file of numbers"),
        (save({"a": ROWS, "b": ROWS}), "2 tensors"),
        (save({"a": ROWS.astype(np.float64)}), "F64"),
        (save({"a": ROWS})[:-4], "safetensors|tensor"),
        (b"", "safetensors"),
        (struct.pack("<Q", 70_000) + b"[" * 70_000, "header has more than 65536 bytes"),
        (b"PK\3\4 a zip", "safetensors"),
    ],
)
def test_anything_else_is_refused_by_name(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as raised:
        read(data)
    assert raised.value.param == "prompt_embeds"


def with_header(header: str, data: bytes = b"") -> bytes:
    """Return a NumPy file of version 1.0 with this text as its header."""
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


SHAPE = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"


@pytest.mark.parametrize(
    "header",
    [
        "{'descr':(",
        "'" * 3,
        "(" * 9000,
        "{[]: 1}",
        "{1: 2, 'a': 3}",
        "{'descr': (), 'fortran_order': False, 'shape': (1, 8)}",
        "{'descr': 'O', 'fortran_order': False, 'shape': (1, 8)}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1, 8)}",
        SHAPE % "(True, 8)",
        SHAPE % f"({2**70}, 8)",
        SHAPE % f"({2**33}, 8)",
        SHAPE % f"({2**70}, 0)",
        SHAPE % "(-1, -8)",
        SHAPE % ("(" + "1," * 70 + ")"),
        SHAPE % "()",
    ],
)
def test_headers_that_lie_are_refused(header: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(with_header(header, b"\0" * 32))
    assert refused.value.param == "prompt_embeds"


@pytest.mark.parametrize("shape", [[1] * 70, [2**70, 0], [2**64, 8]])
def test_shapes_that_no_array_has_are_refused(shape: list[int]) -> None:
    size = 4 if shape[0] == 1 else 0
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"rows": entry}).encode()
    with pytest.raises(InvalidRequestError, match="shape"):
        read(len(header).to_bytes(8, "little") + header + b"\0" * size)


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "opened")
    with pytest.raises(InvalidRequestError):
        read(npy(np.array([[evil]], dtype=object), allow_pickle=True))
    with pytest.raises(InvalidRequestError):
        read(pickle.dumps(evil))
    assert not evil.path.exists()


@pytest.mark.parametrize("text", ["not base64!", "AAA", "é"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="base64"):
        read_embeds(text, INFO)


def test_a_model_without_rows_says_which_flag_is_missing() -> None:
    with pytest.raises(InvalidRequestError, match="--enable-prompt-embeds"):
        read_embeds(base64.b64encode(npy(ROWS)).decode(), make_info())


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused(data: bytes, as_npy: bool) -> None:
    text = base64.b64encode(npy(ROWS)[:20] + data if as_npy else data).decode()
    with pytest.raises(InvalidRequestError) as refused:
        read_embeds(text, INFO)
    assert refused.value.param == "prompt_embeds"
