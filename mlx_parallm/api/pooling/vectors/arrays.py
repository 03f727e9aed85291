"""The arrays of an answer: as numbers, in base64 or as bytes, as in vLLM."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import AliasChoices, Field, StrictBool
from starlette.responses import Response

from mlx_parallm.api.pooling.answer import Encoded
from mlx_parallm.api.pooling.inputs.schema import Dimensions, TextsRequest
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import LABEL_TASKS, PoolingInfo, ProblemType, Task

# MAX_DESCRIBED: arrays that a header can describe. Clients accept heads of some 64 KiB, and each
# array adds 110 bytes.
MAX_DESCRIBED = 256
#: ``BYTES``: what routes with such answers say in the API's document.
BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}
_DTYPES: Mapping[str, str] = {"float32": "f4", "float16": "f2"}


class ArraysRequest(TextsRequest):
    """The fields that choose the form of each input's array."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = Field(
        "float",
        description="Numbers; base64 of the bytes of numbers; or the bytes alone as the body, "
        "with or without a header `metadata` that says what they are.",
    )
    embed_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="Type of numbers as bytes."
    )
    endianness: Literal["native", "little", "big"] = Field(
        "native", description="Byte order of numbers as bytes; native is little."
    )
    dimensions: Dimensions = None
    use_activation: StrictBool | None = Field(
        None,
        validation_alias=AliasChoices("use_activation", "normalize"),
        description="Divide vectors by their lengths, make probabilities of logits. Vectors: as "
        "the model's files say by default; probabilities: true. Also as normalize.",
    )


def check_dimensions(dimensions: int | None, model: PoolingModel) -> None:
    """Raise InvalidRequestError if the model's vectors cannot be cut to this length."""
    info = model.info
    if dimensions is None or dimensions == info.dims:
        return
    if dimensions > info.dims or (
        info.shorter_dims is not None and dimensions not in info.shorter_dims
    ):
        raise InvalidRequestError(
            f"{model.names[0]} has vectors of {info.dims} numbers, not of {dimensions}.",
            param="dimensions",
        )


def finished(
    results: Sequence[np.ndarray],
    task: Task,
    info: PoolingInfo,
    dimensions: int | None = None,
    use_activation: bool | None = None,
) -> Sequence[np.ndarray]:
    """Return results as the answer gives them: probabilities, or vectors of their final length.

    Vectors are cut (Matryoshka, https://arxiv.org/abs/2205.13147), then divided by their norms.

    Args:
        results: at least one.
        task: the task of all inputs.
        info: the model's facts.
        dimensions: length of vectors, which was checked; None: the model's.
        use_activation: False: logits stay, vectors are not normalised; None: the model's way.
    """
    if task in LABEL_TASKS:
        activates = use_activation is not False
        return [activated(row, info.problem_type) for row in results] if activates else results
    normalizes = info.normalizes if use_activation is None else use_activation
    # Vectors of texts have one length, so that NumPy can work on all of them together.
    arrays = [_stacked(results)] if task == "embed" else results
    cut = [each[..., :dimensions] for each in arrays]
    vectors = [unit_vectors(each) for each in cut] if normalizes else cut
    return list(vectors[0]) if task == "embed" else vectors


def _stacked(vectors: Sequence[np.ndarray]) -> np.ndarray:
    return vectors[0][np.newaxis] if len(vectors) == 1 else np.stack(vectors)


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return vectors ``[..., dims]`` divided by their norms; a vector of zeros stays."""
    # The steps of np.linalg.norm, whose checks take longer than the norm of a vector.
    norms = np.sqrt(np.add.reduce(vectors * vectors, axis=-1, keepdims=True))
    return vectors / np.maximum(norms, 1e-12)


def similarities(vectors: Sequence[np.ndarray]) -> list[float]:
    """Return the cosine of the first vector with each other one."""
    array = unit_vectors(np.stack(vectors).astype(np.float64))
    return (array[1:] @ array[0]).tolist()


def check_format(body: ArraysRequest, num_arrays: int) -> None:
    """Raise InvalidRequestError if the body's format cannot hold so many arrays."""
    if body.encoding_format == "bytes" and num_arrays > MAX_DESCRIBED:
        raise InvalidRequestError(
            f"The header of bytes describes at most {MAX_DESCRIBED} inputs. Use bytes_only, which "
            "has no header.",
            param="encoding_format",
        )


def _in_json(array: np.ndarray, body: ArraysRequest) -> Any:
    """Return nested lists of numbers, or the base64 of their bytes in the order of rows."""
    if body.encoding_format == "float":
        return array.tolist()
    return base64.b64encode(as_bytes(array, body.embed_dtype, body.endianness)).decode()


def as_bytes(array: np.ndarray, dtype: str = "float32", endianness: str = "little") -> bytes:
    """Return the numbers as bytes, in the order of rows; "native" is little-endian everywhere."""
    order = ">" if endianness == "big" else "<"
    if dtype == "bfloat16":
        return _bfloat16(array).astype(f"{order}u2").tobytes()
    # A number that 16 bits cannot hold becomes infinite, as in vLLM.
    with np.errstate(over="ignore"):
        return array.astype(order + _DTYPES[dtype]).tobytes()


def _bfloat16(array: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, uint16: the upper half of a float32.

    Ties go to even.
    """
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def arrays_answer(
    encoded: Encoded, body: ArraysRequest, *, kind: str, field: str
) -> dict[str, Any] | Response:
    """Return vLLM's list with an array for each input, or the bytes of all arrays alone.

    Args:
        encoded: the inputs and their results.
        body: chooses the format.
        kind: ``object`` of the list's entries.
        field: the entries' field that has the array.
    """
    task, info = encoded.inputs[0].task, encoded.call.model.info
    arrays = finished(encoded.results, task, info, body.dimensions, body.use_activation)
    if body.encoding_format in ("bytes", "bytes_only"):
        return _bytes_response(arrays, encoded, body)
    data = [
        {"object": kind, "index": index, field: _in_json(array, body)}
        for index, array in enumerate(arrays)
    ]
    return encoded.answer(data)


def _bytes_response(
    arrays: Sequence[np.ndarray], encoded: Encoded, body: ArraysRequest
) -> Response:
    """Return the bytes of all arrays, with a header ``metadata`` unless bytes only are wanted."""
    parts = [as_bytes(array, body.embed_dtype, body.endianness) for array in arrays]
    headers = None
    if body.encoding_format == "bytes":
        ends = np.cumsum([len(part) for part in parts]).tolist()
        data = [
            {
                "index": index,
                "embed_dtype": body.embed_dtype,
                "endianness": body.endianness,
                "start": end - len(part),
                "end": end,
                "shape": array.shape,
            }
            for index, (array, part, end) in enumerate(zip(arrays, parts, ends, strict=True))
        ]
        headers = {"metadata": json.dumps(encoded.answer(data))}
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)


def activated(logits: np.ndarray, problem_type: ProblemType | None) -> np.ndarray:
    """Return scores of labels from logits, as the pipelines of transformers and vLLM compute them.

    Values of a regression stay. Labels that do not exclude each other, and a single label, get a
    probability each (sigmoid); other labels share one (softmax).

    Args:
        logits: float32 ``[..., labels]``.
        problem_type: the model's; None: the number of labels decides.

    Returns:
        An array of the same shape.
    """
    if problem_type == "regression":
        return logits
    if problem_type == "multi_label_classification" or logits.shape[-1] == 1:
        # This form of the sigmoid cannot overflow.
        return 0.5 * (1 + np.tanh(0.5 * logits))
    return softmax(logits)


def ranked_labels(scores: np.ndarray, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the labels of a text with their scores, the likeliest first, equals in order."""
    order = np.argsort(-scores, kind="stable")
    return [{"label": labels[place], "score": float(scores[place])} for place in order]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the shares of the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithms of ``softmax``."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
