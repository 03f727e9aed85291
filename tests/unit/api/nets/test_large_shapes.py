"""Shapes that no array has, in every form in which clients send a shape beside bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from mlx_parallm.adapters.safetensors import INPUT_DTYPES, MODEL_DTYPES, read_safetensors
from mlx_parallm.api.completions.embeds import NPY_MAGIC, _read_npy
from mlx_parallm.api.nets.bodies import FILE_TYPE, PREDICT, read_body
from mlx_parallm.api.nets.oip.datatypes import DATATYPES, read_inputs
from mlx_parallm.api.nets.oip.schema import InferInput
from mlx_parallm.api.nets.tensors import MARK, decoded
from mlx_parallm.types.errors import InvalidRequestError

Shape = Sequence[int]
#: SHAPES: some are too large for NumPy at once, others once an array is widened or stacked.
SHAPES = ([0, 2**62], [2**62, 0], [0, 2**61], [0, 2**60], [0, 2**41], [2**31, 2**31, 0])


def in_numpy_object(dtype: str) -> Callable[[Shape], object]:
    return lambda shape: decoded({MARK: "", "dtype": dtype, "shape": shape}, "inputs.x")


def in_list_of_objects(shape: Shape) -> object:
    return decoded([{MARK: "", "dtype": "|u1", "shape": shape}] * 16, "inputs.x")


def file_of(dtype: str, shape: Shape) -> bytes:
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    return len(header).to_bytes(8, "little") + header


def in_body_file(dtype: str) -> Callable[[Shape], object]:
    return lambda shape: read_body(FILE_TYPE, file_of(dtype, shape), PREDICT)


def in_weights_file(dtype: str) -> Callable[[Shape], object]:
    return lambda shape: read_safetensors(file_of(dtype, shape), param="x", dtypes=MODEL_DTYPES)


def in_npy_file(shape: Shape) -> object:
    text = str({"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}).encode()
    return _read_npy(NPY_MAGIC + b"\x01\x00" + len(text).to_bytes(2, "little") + text)


def in_protocol(datatype: str, *, is_binary: bool) -> Callable[[Shape], object]:
    content = {"parameters": {"binary_data_size": 0}} if is_binary else {"data": []}

    def read(shape: Shape) -> object:
        fields = {"name": "x", "datatype": datatype, "shape": list(shape)} | content
        return read_inputs([InferInput.model_validate(fields)], memoryview(b""), [])

    return read


FORMS = {
    **{f"json-numpy {dtype}": in_numpy_object(dtype) for dtype in ("|b1", "|u1", "<f2", "<f8")},
    "json-numpy in a list": in_list_of_objects,
    **{f"safetensors {dtype}": in_body_file(dtype) for dtype in sorted(INPUT_DTYPES)},
    **{f"weights {dtype}": in_weights_file(dtype) for dtype in sorted(MODEL_DTYPES)},
    "npy": in_npy_file,
    **{f"v2 {each}": in_protocol(each, is_binary=False) for each in DATATYPES.values()},
    **{f"v2 binary {each}": in_protocol(each, is_binary=True) for each in DATATYPES.values()},
}


@pytest.mark.parametrize("form", FORMS)
def test_shapes_that_no_array_has_are_refused(form: str) -> None:
    for shape in SHAPES:
        with pytest.raises(InvalidRequestError, match=r"too large|shape"):
            FORMS[form](shape)


@pytest.mark.parametrize("form", FORMS)
def test_arrays_without_numbers_are_read(form: str) -> None:
    FORMS[form]([0, 2**20])
