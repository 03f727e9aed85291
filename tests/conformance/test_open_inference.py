"""Triton's and KServe's clients on nets: JSON, bytes, gzip, sequences and refusals"""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput
from tritonclient import http
from tritonclient.http import aio
from tritonclient.utils import InferenceServerException

OBS = np.random.default_rng(5).normal(size=(3, 4)).astype(np.float32)
STEPS = np.random.default_rng(6).normal(size=(1, 5, 3)).astype(np.float32)


@pytest.fixture
def headers(server: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {server.api_key}"}


@pytest.fixture
def address(server: Any) -> str:
    return server.url.removeprefix("http://")


@pytest.fixture
def triton(address: str) -> Any:
    with http.InferenceServerClient(address) as client:
        yield client


def tensor(array: np.ndarray, *, binary: bool = True) -> Any:
    made = http.InferInput("obs", list(array.shape), "FP32")
    return made.set_data_from_numpy(array, binary_data=binary)


def wanted(*names: str, binary: bool = True) -> list[Any]:
    return [http.InferRequestedOutput(name, binary_data=binary) for name in names]


def test_triton_health_and_metadata(triton: Any, headers: dict[str, str]) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    for version in ("", "1"):
        assert triton.is_model_ready("policy", version, headers=headers)
        facts = triton.get_model_metadata("policy", version, headers=headers)
        assert facts["inputs"] == [{"name": "obs", "datatype": "FP32", "shape": [-1, 4]}]
    assert not triton.is_model_ready("policy", "2", headers=headers)
    assert not triton.is_model_ready("unknown", headers=headers)
    assert "binary_tensor_data" in triton.get_server_metadata()["extensions"]


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("outputs", ["all", "binary", "json"])
def test_triton_forms(
    triton: Any, headers: dict[str, str], coding: str | None, binary_input: bool, outputs: str
) -> None:
    expected = triton.infer("policy", [tensor(OBS)], headers=dict(headers))
    result = triton.infer(
        "policy",
        [tensor(OBS, binary=binary_input)],
        outputs=None if outputs == "all" else wanted("value", binary=outputs == "binary"),
        headers=dict(headers),
        request_id="7",
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    assert result.get_response()["id"] == "7"
    assert result.as_numpy("value").tobytes() == expected.as_numpy("value").tobytes()
    assert (result.as_numpy("logits") is None) == (outputs != "all")


def test_triton_at_once(address: str, headers: dict[str, str]) -> None:
    with http.InferenceServerClient(address, concurrency=4) as client:
        waiting = [client.async_infer("policy", [tensor(OBS)], headers=headers) for _ in range(8)]
        values = {each.get_result().as_numpy("value").tobytes() for each in waiting}
    assert len(values) == 1


def test_triton_sequence(triton: Any, headers: dict[str, str]) -> None:
    whole = triton.infer("memory", [tensor(STEPS)], headers=headers).as_numpy("logits")
    for sequence_id in (9, "nine"):
        for step in range(5):
            result = triton.infer(
                "memory",
                [tensor(STEPS[:, step])],
                sequence_id=sequence_id,
                sequence_start=step == 0,
                sequence_end=step == 4,
                headers=dict(headers),
            )
            np.testing.assert_allclose(result.as_numpy("logits"), whole[:, step], atol=1e-6)
        with pytest.raises(InferenceServerException, match="sequence") as caught:
            triton.infer(
                "memory", [tensor(STEPS[:, 0])], sequence_id=sequence_id, headers=dict(headers)
            )
        assert caught.value.status() == "409"


def test_triton_is_told_what_is_wrong(triton: Any, headers: dict[str, str]) -> None:
    def refusal(name: str, *inputs: Any, version: str = "") -> str:
        with pytest.raises(InferenceServerException) as caught:
            triton.infer(name, inputs, version, headers=dict(headers))
        return f"{caught.value.status()} {caught.value.message()}"

    assert refusal("unknown", tensor(OBS)).startswith("404 The model `unknown` does not exist")
    assert refusal("policy", tensor(OBS), version="2").startswith("404 ")
    assert "400 inputs.obs has the shape [3, 3]" in refusal("policy", tensor(OBS[:, :3]))
    assert "400 inputs.obs has NaN" in refusal("policy", tensor(OBS * np.nan))
    wide = http.InferInput("obs", [3, 4], "FP64").set_data_from_numpy(OBS.astype(np.float64))
    assert "400 inputs.obs is FP64; expected FP32" in refusal("policy", wide)
    shared = http.InferInput("obs", [3, 4], "FP32")
    shared.set_shared_memory("region", 48)
    wanted = "400 inputs.obs has the parameter shared_memory_region"
    assert refusal("policy", shared).startswith(wanted)
    with pytest.raises(InferenceServerException, match="API key"):
        triton.infer("policy", [tensor(OBS)])


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
async def test_triton_aio(address: str, headers: dict[str, str], coding: str | None) -> None:
    async with aio.InferenceServerClient(address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("policy", headers=headers)
        facts = await client.get_model_metadata("policy", headers=headers)
        assert facts["versions"] == ["1"]
        result = await client.infer(
            "policy",
            [tensor(OBS)],
            headers=dict(headers),
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        )
        assert result.as_numpy("logits").shape == (3, 2)
        for step in range(2):
            await client.infer(
                "memory",
                [tensor(STEPS[:, step], binary=False)],
                sequence_id=11,
                sequence_start=not step,
                headers=dict(headers),
            )
        with pytest.raises(InferenceServerException, match="does not exist"):
            await client.infer("unknown", [tensor(OBS)], headers=dict(headers))


@pytest.fixture
async def kserve(server: Any) -> Any:
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        yield client


def kserve_request(array: np.ndarray, binary: bool, **more: Any) -> InferRequest:
    made = InferInput("obs", list(array.shape), "FP32")
    made.set_data_from_numpy(array, binary_data=binary)
    return InferRequest("policy", [made], **more)


async def test_kserve_health(server: Any, kserve: Any, headers: dict[str, str]) -> None:
    assert await kserve.is_server_live(server.url)
    assert await kserve.is_server_ready(server.url)
    assert await kserve.is_model_ready(server.url, "policy", headers=headers)
    assert not await kserve.is_model_ready(server.url, "unknown", headers=headers)


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False])
async def test_kserve_forms(
    server: Any,
    kserve: Any,
    triton: Any,
    headers: dict[str, str],
    binary_input: bool,
    binary_output: bool,
) -> None:
    expected = triton.infer("policy", [tensor(OBS)], headers=dict(headers))
    request = kserve_request(
        OBS,
        binary_input,
        request_id="8",
        parameters={"binary_data_output": binary_output},
        request_outputs=[RequestedOutput("value")],
    )
    answer = await kserve.infer(server.url, request, "policy", headers=dict(headers))
    (output,) = answer.outputs
    assert (answer.id, answer.model_name, output.name) == ("8", "policy", "value")
    assert output.as_numpy().tobytes() == expected.as_numpy("value").tobytes()


async def test_kserve_is_told_what_is_wrong(
    server: Any, kserve: Any, headers: dict[str, str]
) -> None:
    narrow, right = kserve_request(OBS[:, :3], binary=True), kserve_request(OBS, binary=False)
    with pytest.raises(httpx.HTTPStatusError, match=r"inputs.obs has the shape \[3, 3\].*400"):
        await kserve.infer(server.url, narrow, "policy", headers=dict(headers))
    with pytest.raises(httpx.HTTPStatusError, match="does not exist"):
        await kserve.infer(server.url, right, "unknown", headers=dict(headers))
