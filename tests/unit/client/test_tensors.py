"""Tensors as the bytes of a safetensors file: read back by the library of that name and by us."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.client.tensors import decode_safetensors, encode_safetensors

DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=5))
        ),
        max_size=5,
    )
)
def test_numpy_arrays_are_read_back(arrays: dict[str, np.ndarray]) -> None:
    arrays.pop("__metadata__", None)
    decoded = safetensors.numpy.load(encode_safetensors(arrays))
    assert set(decoded) == set(arrays)
    for name, array in arrays.items():
        assert decoded[name].dtype == array.dtype
        assert decoded[name].tobytes() == array.tobytes()
        assert decoded[name].shape == array.shape


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_mlx_arrays_are_read_back(dtype: mx.Dtype) -> None:
    array = mx.arange(24).reshape(2, 3, 4).astype(dtype) / 7
    tensors = {"whole": array, "transposed": array.T, "part": array[:, 1:, ::2], "none": array[:0]}
    decoded = read_safetensors(encode_safetensors(tensors), param="file")
    assert set(decoded) == set(tensors)
    for name, expected in tensors.items():
        read = to_mlx(decoded[name])
        assert read.dtype == dtype
        assert read.shape == expected.shape
        assert mx.array_equal(read, expected)


def test_strided_numpy_arrays_are_written_in_order() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    decoded = safetensors.numpy.load(encode_safetensors({"t": array.T, "s": array[:, ::-2]}))
    np.testing.assert_array_equal(decoded["t"], array.T)
    np.testing.assert_array_equal(decoded["s"], array[:, ::-2])


@pytest.mark.parametrize(
    "wrong", [[1.0, 2.0], "text", 3, np.zeros(2, complex), np.zeros(2, ">f4"), np.zeros(2, object)]
)
def test_what_is_no_array_of_numbers_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(TypeError, match="'lora_a'"):
        encode_safetensors({"lora_a": wrong})


def test_neither_mlx_nor_the_server_is_imported() -> None:
    code = (
        "import sys, mlx_parallm.client; "
        "print(*[n for n in ('mlx', 'mlx_lm', 'numpy', 'fastapi', 'mlx_parallm.api', "
        "'mlx_parallm.engine') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_decoded(dtype: str) -> None:
    array = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    tensors, metadata = decode_safetensors(encode_safetensors({"a": array}, {"k": "v"}))
    assert metadata == {"k": "v"}
    read = np.asarray(tensors["a"])
    assert read.tolist() == array.tolist()
    assert read.dtype == (np.float32 if dtype == "f2" else array.dtype)


def test_bfloat16_is_decoded_exactly() -> None:
    array = mx.array([[1.0, -2.5, mx.inf]]).astype(mx.bfloat16)
    tensors, _ = decode_safetensors(encode_safetensors({"a": array}))
    assert np.asarray(tensors["a"]).tolist() == array.tolist()


def test_tensors_of_unknown_dtypes_are_refused() -> None:
    raw = encode_safetensors({"a": np.zeros(2, np.uint8)}).replace(b'"U8"', b'"X8"')
    with pytest.raises(ValueError, match="X8"):
        decode_safetensors(raw)
