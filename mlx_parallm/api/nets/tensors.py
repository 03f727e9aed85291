"""Tensors of JSON bodies: nested lists of numbers, or objects as json-numpy writes them.

NumPy has no bfloat16: such tensors are float32 here, which holds every bfloat16.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from mlx_parallm.adapters.tensors import is_too_large
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object
from mlx_parallm.types.nets import ANY, TensorSpec

#: ``MARK``: the key by which json-numpy (https://pypi.org/project/json-numpy) knows its objects.
MARK = "__numpy__"
#: ``BFLOAT16``: the dtype of a ``TensorSpec`` that NumPy lacks.
BFLOAT16 = "bfloat16"
# DTYPES: dtypes of json-numpy's objects, by NumPy's names. "object" is a pickle.
DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
# MAX_DTYPE_CHARS: "<f4" is NumPy's way to write most of them.
MAX_DTYPE_CHARS = 16
# MAX_DIMS: dimensions of NumPy's arrays.
MAX_DIMS = 64
# NUMBERS: NumPy's kinds of numbers, of which JSON has no others.
NUMBERS = "biuf"


def refused(where: str, why: str) -> InvalidRequestError:
    """Return the refusal of a tensor, whose name follows a dot after its field's."""
    return InvalidRequestError(f"{where} {why}.", param=where.partition(".")[0])


def is_array(value: Any) -> TypeGuard[np.ndarray]:
    """True if a value is an array, which the fields of binary bodies are."""
    return isinstance(value, np.ndarray)


def decoded(value: Any, where: str) -> np.ndarray:
    """Return a tensor of a body; an array, which other forms of bodies have, stays as it is.

    Args:
        value: a JSON value: lists of numbers, an object of json-numpy, or a list of such objects of
            one shape.
        where: the field and the tensor, for refusals.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if is_array(value):
        return value
    if is_object(value):
        return _of_object(value, where)
    if is_list(value) and value and is_object(value[0]):
        return _stacked(value, where)
    return _of_numbers(value, where)


def _of_numbers(value: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        raise refused(where, "has lists of different lengths") from None
    if array.dtype.kind not in NUMBERS:
        raise refused(where, "has something that is not a number, or an integer of over 64 bits")
    return _whole(value, array) if array.dtype.kind == "f" else array


def _whole(value: Any, floats: np.ndarray) -> np.ndarray:
    """Return integers beside which there are some of ``2**63`` and more, which NumPy rounds."""
    if not floats.size or not floats.max() >= 2**63:
        return floats
    numbers = np.asarray(value, object)
    if not all(isinstance(number, int) and number >= 0 for number in numbers.flat):
        return floats
    return numbers.astype(np.uint64)


def _stacked(values: list[Any], where: str) -> np.ndarray:
    arrays = [
        _of_object(each if is_object(each) else {}, f"{where}.{place}")
        for place, each in enumerate(values)
    ]
    if len({array.shape for array in arrays}) > 1:
        raise refused(where, "has arrays of different shapes")
    if arrays[0].ndim == MAX_DIMS:
        raise refused(where, f"has more than {MAX_DIMS} dimensions")
    return np.stack(arrays)


def _of_object(value: dict[str, Any], where: str) -> np.ndarray:
    """Return the array of a json-numpy object, as a view of its bytes."""
    if value.keys() != {MARK, "dtype", "shape"}:
        raise refused(where, f"is an object, but not one of {MARK}, dtype and shape")
    dtype, shape = _dtype(value["dtype"], where), value["shape"]
    if not is_list(shape) or not all(type(size) is int and size >= 0 for size in shape):
        raise refused(where, "has a shape that is no list of sizes")
    data = value[MARK]
    try:
        raw = base64.b64decode(data, validate=True) if isinstance(data, str) else None
    except ValueError:
        raw = None
    if raw is None:
        raise refused(where, f"has a {MARK} that is not base64")
    if len(shape) > MAX_DIMS:
        raise refused(where, f"has more than {MAX_DIMS} dimensions")
    if len(raw) != dtype.itemsize * math.prod(shape):
        raise refused(where, f"has {len(raw)} bytes, which is not what {dtype.name} {shape} takes")
    check_sizes(shape, where)
    array = np.frombuffer(raw, dtype).reshape(shape)
    return checked_booleans(array, where).astype(dtype.newbyteorder("="), copy=False)


def check_sizes(shape: Sequence[int], where: str) -> None:
    """Raise InvalidRequestError if no array has the shape that a client gives."""
    if is_too_large(shape):
        raise refused(where, "has sizes that are too large")


def checked_booleans(array: np.ndarray, where: str) -> np.ndarray:
    """Return an array of bytes from elsewhere; raise InvalidRequestError for odd booleans."""
    if array.dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise refused(where, "has a boolean that is neither 0 nor 1")
    return array


def _dtype(name: Any, where: str) -> np.dtype[Any]:
    if isinstance(name, str) and len(name) <= MAX_DTYPE_CHARS:
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError):
            dtype = None
        if dtype is not None and dtype.name in DTYPES:
            return dtype
    raise refused(where, f"has the dtype {str(name)[:MAX_DTYPE_CHARS]}; arrays of numbers are read")


def written(array: np.ndarray, *, as_object: bool) -> Any:
    """Return a tensor as a JSON value: as json-numpy writes it, or as nested lists of numbers."""
    if not as_object:
        return array.tolist()
    plain = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return {
        MARK: base64.b64encode(plain.data if plain.size else b"").decode(),
        "dtype": plain.dtype.str,
        "shape": list(array.shape),
    }


def described(spec: TensorSpec) -> str:
    """Return a tensor of a signature as refusals write it, such as ``obs: float32 [rows, 4]``."""
    words = ["rows", *("time" if size == ANY else str(size) for size in spec.shape[1:])]
    return f"{spec.name}: {spec.dtype} [{', '.join(words)}]"


def cast(array: np.ndarray, dtype: str, where: str) -> np.ndarray:
    """Return an array in a dtype of a signature.

    Floats of every precision become floats, integers become floats, and integers become other
    integers, or booleans, if all of them fit.

    Raises:
        InvalidRequestError: they do not fit, or numbers are of another kind.
    """
    wanted = np.dtype("float32" if dtype == BFLOAT16 else dtype)
    if array.dtype == wanted:
        return array
    if array.dtype.kind in "iu" and wanted.kind in "iub":
        _check_range(array, wanted, where)
    elif not np.can_cast(array.dtype, wanted, "same_kind"):
        raise refused(where, f"is of {array.dtype.name}; expected {dtype}")
    with np.errstate(over="ignore"):
        return array.astype(wanted)


def _check_range(array: np.ndarray, wanted: np.dtype[Any], where: str) -> None:
    if not array.size:
        return
    low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
    for number in (int(array.min()), int(array.max())):
        if not low <= number <= high:
            raise refused(where, f"has {number}, which {wanted.name} does not hold")


def check_finite(array: np.ndarray, where: str) -> None:
    """Raise InvalidRequestError if a number is infinite or NaN."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise refused(where, "has NaN or infinite numbers")
