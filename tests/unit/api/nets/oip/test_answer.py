"""Answers of Open Inference Protocol v2: an object, and bytes behind it."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from mlx_parallm.api.nets.oip.answer import infer_response
from mlx_parallm.api.nets.oip.body import HEADER_LENGTH, InferBody
from mlx_parallm.api.nets.oip.inference import Inference, WantedOutput
from mlx_parallm.api.nets.oip.schema import InferRequest
from mlx_parallm.types.nets import NetRequest, NetResults, TensorSpec

F32 = TensorSpec("f", "float32", (-1, 2))
BF16 = TensorSpec("b", "bfloat16", (-1, 2))
BOOL = TensorSpec("is", "bool", (-1,))
OUTPUTS = {
    "f": np.array([[0.1, -2], [3, 4e-30]], np.float32),
    "b": np.array([[1.5, -0.0], [2**-130, 3e38]], np.float32),
    "is": np.array([True, False]),
}
# The upper halves of numbers are those of bfloat16.
OUTPUTS["b"] = (OUTPUTS["b"].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def answer(
    *wanted: WantedOutput, coding: str | None = None, outputs: Any = OUTPUTS, **body: Any
) -> Response:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]
    fields = InferRequest.model_validate({"inputs": inputs, **body})
    form = InferBody(fields, memoryview(b""), ())
    request = NetRequest(request_id="", model="a", inputs={}, num_rows=2)
    results = NetResults(outputs=outputs, version="v3", has_other_weights=True)
    return infer_response("a/b", Inference(form, request, wanted), results, coding)


def test_numbers() -> None:
    response = answer(WantedOutput(F32, False), WantedOutput(BOOL, False), id="7")
    assert response.headers["content-type"] == "application/json"
    assert HEADER_LENGTH not in response.headers
    content = json.loads(bytes(response.body))
    assert content == {
        "model_name": "a/b",
        "model_version": "1",
        "id": "7",
        "parameters": {"policy_version": "v3"},
        "outputs": [
            {
                "name": "f",
                "datatype": "FP32",
                "shape": [2, 2],
                "data": OUTPUTS["f"].ravel().tolist(),
            },
            {"name": "is", "datatype": "BOOL", "shape": [2], "data": [True, False]},
        ],
    }
    assert np.float32(content["outputs"][0]["data"]).tobytes() == OUTPUTS["f"].tobytes()


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_bytes_behind_the_object(coding: str | None) -> None:
    wanted = WantedOutput(F32, True), WantedOutput(BOOL, False), WantedOutput(BF16, True)
    response = answer(*wanted, coding=coding)
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers.get("content-encoding") == coding
    read = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(coding or "", bytes)
    body = read(bytes(response.body))
    length = int(response.headers[HEADER_LENGTH])
    content = json.loads(body[:length])
    sizes = [tensor.get("parameters") for tensor in content["outputs"]]
    assert sizes == [{"binary_data_size": 16}, None, {"binary_data_size": 8}]
    assert body[length : length + 16] == OUTPUTS["f"].tobytes()
    halves = np.frombuffer(body[length + 16 :], "<u2").astype(np.uint32) << 16
    assert halves.tobytes() == OUTPUTS["b"].tobytes()


def test_what_json_lacks_is_null_and_stays_in_bytes() -> None:
    outputs = {"f": np.array([[np.nan, np.inf]], np.float32)}
    numbers = answer(WantedOutput(F32, False), outputs=outputs)
    assert json.loads(bytes(numbers.body))["outputs"][0]["data"] == [None, None]
    raw = answer(WantedOutput(F32, True), outputs=outputs)
    assert bytes(raw.body).endswith(outputs["f"].tobytes())


def test_a_sequence_is_told_of_other_weights() -> None:
    content = json.loads(bytes(answer(parameters={"sequence_id": 3}).body))
    assert content["parameters"] == {"policy_version": "v3", "state_has_other_weights": True}
