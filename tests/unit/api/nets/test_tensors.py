"""Tensors of JSON bodies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.nets.tensors import cast, check_finite, decoded, described, written
from mlx_parallm.types.errors import InvalidRequestError
from tests.nets import IMAGE, TIMED, json_numpy

DTYPES = ("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_arrays_survive_json_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype)
    read = decoded(json_numpy(array), "inputs.x")
    assert read.dtype == array.dtype
    assert read.shape == shape
    assert read.tobytes() == array.tobytes()
    assert written(read, as_object=True) == json_numpy(array)


def test_bytes_of_an_array_are_not_copied() -> None:
    read = decoded(json_numpy(np.arange(6, dtype=np.float32)), "inputs.x")
    assert not read.flags.owndata
    assert not read.flags.writeable


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2"])
def test_other_byte_orders_are_read(dtype: str) -> None:
    array = np.arange(4).astype(dtype)
    read = decoded(json_numpy(array), "inputs.x")
    assert read.tolist() == [0, 1, 2, 3]
    assert read.dtype.isnative


def test_arrays_without_rows_order_are_written_as_they_are_indexed() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert decoded(written(array, as_object=True), "x").tolist() == array.tolist()


def test_a_list_of_arrays_is_stacked() -> None:
    rows = [np.arange(3, dtype=np.float32), np.ones(3, np.float32)]
    read = decoded([json_numpy(row) for row in rows], "inputs.x")
    assert read.tolist() == [[0, 1, 2], [1, 1, 1]]


def test_single_precision_survives_json_numbers() -> None:
    array = np.random.default_rng(0).normal(size=100).astype(np.float32)
    read = cast(decoded(written(array, as_object=False), "x"), "float32", "x")
    assert read.tobytes() == array.tobytes()


GOOD = json_numpy(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([[1, 2], [3]], "different lengths"),
        ([1, "2"], "not a number"),
        ("1", "not a number"),
        (None, "not a number"),
        ([1, None], "not a number"),
        ([2**70], "not a number"),
        ({}, "object"),
        ({"a": 1}, "object"),
        (GOOD | {"more": 1}, "object"),
        (GOOD | {"dtype": "|O"}, "the dtype |O"),
        (GOOD | {"dtype": "object"}, "the dtype object"),
        (GOOD | {"dtype": "<U6"}, "the dtype <U6"),
        (GOOD | {"dtype": "f4,f4"}, "the dtype f4,f4"),
        (GOOD | {"dtype": "<c8"}, "the dtype <c8"),
        (GOOD | {"dtype": "<M8[s]"}, "the dtype"),
        (GOOD | {"dtype": [["a", "<f4"]]}, "the dtype"),
        (GOOD | {"dtype": "(2,)f4"}, "the dtype"),
        (GOOD | {"dtype": None}, "the dtype None"),
        (GOOD | {"shape": [-1, 3]}, "no list of sizes"),
        (GOOD | {"shape": [2.0, 3]}, "no list of sizes"),
        (GOOD | {"shape": [True, 3]}, "no list of sizes"),
        (GOOD | {"shape": 6}, "no list of sizes"),
        (GOOD | {"shape": [2, 4]}, "24 bytes"),
        (GOOD | {"shape": [10**30, 10**30]}, "24 bytes"),
        (GOOD | {"shape": [1] * 70 + [6]}, "dimensions"),
        (GOOD | {"__numpy__": "", "shape": [0, 2**62, 2**62]}, "too large"),
        (GOOD | {"__numpy__": "", "shape": [0, 10**30]}, "too large"),
        (GOOD | {"__numpy__": "=="}, "not base64"),
        (GOOD | {"__numpy__": "a b"}, "not base64"),
        (GOOD | {"__numpy__": [1]}, "not base64"),
        ([GOOD, json_numpy(np.zeros(3))], "different shapes"),
        ([GOOD, 1], "object"),
        ([GOOD | {"shape": [1] * 62 + [2, 3]}] * 2, "dimensions"),
        (json_numpy(np.zeros(3)) | {"dtype": "|b1", "shape": [24]}, None),
        (json_numpy(np.full(3, 7, np.uint8)) | {"dtype": "|b1"}, "neither 0 nor 1"),
    ],
)
def test_other_values_are_refused_by_name(value: Any, why: str | None) -> None:
    if why is None:
        assert not decoded(value, "observations.obs").any()
        return
    with pytest.raises(InvalidRequestError, match=r"observations\.obs") as refusal:
        decoded(value, "observations.obs")
    assert why in str(refusal.value)
    assert refusal.value.param == "observations"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([2**63, 2**64 - 1], "uint64"),
        ([[0], [2**64 - 1]], "uint64"),
        ([2**53 + 1, 2**63], "uint64"),
        ([2**63 - 1, -(2**63)], "int64"),
        # No dtype of 64 bits has both, and floats are close to both.
        ([-1, 2**63], "float64"),
        ([0.5, 2**63], "float64"),
        ([math.nan, 2**63], "float64"),
    ],
)
def test_integers_of_64_bits_are_exact(value: list[Any], dtype: str) -> None:
    array = decoded(value, "observations.obs")
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.array(value, dtype))


@pytest.mark.parametrize(
    ("array", "dtype", "expected"),
    [
        (np.array([1, 2]), "float32", [1.0, 2.0]),
        (np.array([0.5]), "float16", [0.5]),
        (np.array([0.5]), "bfloat16", [0.5]),
        (np.array([0, 255]), "uint8", [0, 255]),
        (np.array([2**63], np.uint64), "uint64", [2**63]),
        (np.array([0, 1], np.int8), "bool", [False, True]),
        (np.array([True]), "float32", [1.0]),
        (np.array([], np.int64), "uint8", []),
    ],
)
def test_numbers_become_those_of_the_signature(
    array: np.ndarray, dtype: str, expected: list[Any]
) -> None:
    assert cast(array, dtype, "x").tolist() == expected


@pytest.mark.parametrize(
    ("array", "dtype", "why"),
    [
        (np.array([256]), "uint8", "256"),
        (np.array([-1]), "uint8", "-1"),
        (np.array([2**63], np.uint64), "int64", str(2**63)),
        (np.array([1.0]), "uint8", "float64"),
        (np.array([1.0]), "bool", "float64"),
        (np.array([2]), "bool", "2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(array: np.ndarray, dtype: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        cast(array, dtype, "x")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300])
def test_numbers_that_are_not_finite_are_refused_by_name(number: float) -> None:
    array = cast(np.array([1.0, number]), "float32", "observations.obs")
    with pytest.raises(InvalidRequestError, match=r"observations\.obs has NaN or infinite"):
        check_finite(array, "observations.obs")


def test_signatures_are_described() -> None:
    assert described(TIMED) == "obs: float32 [rows, time, 4]"
    assert described(IMAGE) == "image: uint8 [rows, 3, 2, 2]"
