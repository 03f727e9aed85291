"""Open Inference Protocol v2 over HTTP, as any client may send it."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_parallm.api.nets.oip.body import HEADER_LENGTH
from tests.net_folders import policy_outputs, write_memory, write_policy
from tests.server_process import POOL, ROOT, ServerProcess

KEY = {"authorization": "Bearer secret"}
CHAT = ROOT / "mlx_parallm" / "demo_models" / "chat"
OBS = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
NAMED = "/v2/models/team/policy"
INFER = f"{NAMED}/infer"


@dataclass
class Served:
    process: ServerProcess
    policy: Path

    def get(self, path: str, **headers: str) -> httpx2.Response:
        return httpx2.get(f"{self.process.url}{path}", headers=KEY | headers)

    def post(self, path: str, body: bytes, **headers: str) -> httpx2.Response:
        return httpx2.post(f"{self.process.url}{path}", content=body, headers=KEY | headers)

    def infer(self, body: Any, path: str = INFER) -> Any:
        answer = self.post(path, json.dumps(body).encode())
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, status: int, body: Any, path: str = INFER, **headers: str) -> str:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return error(self.post(path, raw, **headers), status)


def error(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert list(content) == ["error"]
    return content["error"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policies") / "policy")


@pytest.fixture(scope="module")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    memory = write_memory(tmp_path_factory.mktemp("nets") / "memory")
    names = (f"{policy}=team/policy", f"{memory}=memory", f"{CHAT}=chat")
    process = ServerProcess(
        *("--model", str(CHAT), str(policy), str(memory), "--served-model-name", *names),
        *("--api-key", "secret", "--api-key", "other"),
        env=POOL,
    )
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def served(server: ServerProcess, policy: Path) -> Served:
    return Served(server, policy)


def obs(array: np.ndarray = OBS, name: str = "obs") -> dict[str, Any]:
    shape, data = list(array.shape), array.ravel().tolist()
    return {"name": name, "datatype": "FP32", "shape": shape, "data": data}


def raw_body(array: np.ndarray = OBS, **more: Any) -> tuple[bytes, dict[str, str]]:
    """Return a body with bytes behind its object, and its headers."""
    tensor = obs(array) | {"parameters": {"binary_data_size": array.nbytes}}
    del tensor["data"]
    text = json.dumps({"inputs": [tensor], **more}).encode()
    return text + array.tobytes(), {HEADER_LENGTH: str(len(text))}


def arrays(answer: Any) -> dict[str, np.ndarray]:
    return {
        each["name"]: np.array(each["data"], np.float32).reshape(each["shape"])
        for each in answer["outputs"]
    }


def test_the_server_says_what_it_is(served: Served) -> None:
    for path, body in (
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2", None),
    ):
        # No key is needed.
        answer = httpx2.get(f"{served.process.url}{path}")
        assert answer.status_code == 200
        assert body in (None, answer.json())
    assert served.get("/v2").json()["extensions"] == ["binary_tensor_data", "sequence"]


def test_a_net_says_what_it_takes(served: Served) -> None:
    for path in (NAMED, f"{NAMED}/versions/1"):
        assert served.get(path).json() == {
            "name": "team/policy",
            "versions": ["1"],
            "platform": "mlx_parallm_net",
            "inputs": [{"name": "obs", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [
                {"name": "logits", "datatype": "FP32", "shape": [-1, 2]},
                {"name": "value", "datatype": "FP32", "shape": [-1, 1]},
            ],
        }
        ready = served.get(f"{path}/ready")
        assert (ready.status_code, ready.json()) == (200, {"name": "team/policy", "ready": True})
    assert served.get("/v2/models/memory").json()["inputs"][0]["shape"] == [-1, -1, 3]


def test_answers_are_those_of_the_net(served: Served) -> None:
    answer = served.infer({"id": "42", "inputs": [obs()]})
    outputs = arrays(answer)
    assert [answer[name] for name in ("id", "model_name", "model_version")] == [
        "42",
        "team/policy",
        "1",
    ]
    assert isinstance(answer["parameters"]["policy_version"], str)
    weights = load_file(str(served.policy / "model.safetensors"))
    for name, expected in policy_outputs(weights, OBS).items():
        np.testing.assert_allclose(outputs[name], expected, atol=1e-5)
    assert arrays(served.infer({"inputs": [obs()]}, f"{NAMED}/versions/1/infer")).keys() == {
        "logits",
        "value",
    }


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_the_content_type_does_not_matter(served: Served, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    assert served.post(INFER, json.dumps({"inputs": [obs()]}).encode(), **headers).is_success


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("accepted", ["identity", "gzip", "deflate"])
def test_all_forms_have_the_same_bits(served: Served, sent: str | None, accepted: str) -> None:
    expected = arrays(served.infer({"inputs": [obs()]}))
    body, headers = raw_body(parameters={"binary_data_output": True})
    if sent:
        body = gzip.compress(body) if sent == "gzip" else zlib.compress(body)
        headers["content-encoding"] = sent
    answer = served.post(INFER, body, **headers, **{"accept-encoding": accepted})
    assert answer.status_code == 200, answer.text
    coding = answer.headers.get("content-encoding", "identity")
    assert coding == accepted
    # The client has undone the compression.
    length = int(answer.headers[HEADER_LENGTH])
    content, behind = json.loads(answer.content[:length]), answer.content[length:]
    for output in content["outputs"]:
        size = output["parameters"]["binary_data_size"]
        assert behind[:size] == expected[output["name"]].tobytes()
        behind = behind[size:]
    assert behind == b""


def test_rows_do_not_depend_on_others(served: Served) -> None:
    together = arrays(served.infer({"inputs": [obs()]}))
    with ThreadPoolExecutor(8) as threads:
        rows = list(
            threads.map(lambda row: arrays(served.infer({"inputs": [obs(row)]})), OBS[:, None])
        )
    for name, whole in together.items():
        assert np.concatenate([row[name] for row in rows]).tobytes() == whole.tobytes()


def memory(x: np.ndarray, **parameters: Any) -> dict[str, Any]:
    return {"inputs": [obs(x)], "parameters": parameters}


MEMORY = "/v2/models/memory/infer"
STEPS = np.random.default_rng(4).normal(size=(2, 6, 3)).astype(np.float32)


def test_a_sequence_goes_on_where_it_was(served: Served) -> None:
    whole = arrays(served.infer(memory(STEPS), MEMORY))["logits"]
    assert whole.shape == (2, 6, 2)
    for step in range(6):
        parameters = {"sequence_start": step == 0, "sequence_end": step == 5}
        body = memory(STEPS[:, step], sequence_id=77, **parameters)
        answer = served.infer(body, MEMORY)
        assert answer["parameters"]["state_has_other_weights"] is False
        np.testing.assert_allclose(arrays(answer)["logits"], whole[:, step], atol=1e-6)
    assert "'77'" in served.refusal(409, memory(STEPS[:, 0], sequence_id=77), MEMORY)


def test_a_sequence_is_its_clients_own(served: Served) -> None:
    served.infer(memory(STEPS[:, 0], sequence_id="own", sequence_start=True), MEMORY)
    body = json.dumps(memory(STEPS[:, 0], sequence_id="own")).encode()
    other = {"authorization": "Bearer other"}
    error(httpx2.post(f"{served.process.url}{MEMORY}", content=body, headers=other), 409)
    assert served.post(MEMORY, body).is_success
    # A sequence keeps its rows.
    assert "rows" in served.refusal(409, memory(STEPS[:1, 0], sequence_id="own"), MEMORY)


@pytest.mark.parametrize(
    "path",
    [
        f"{NAMED}/versions/2",
        f"{NAMED}/versions/2/ready",
        "/v2/models/unknown",
        "/v2/models/unknown/ready",
        f"{NAMED}/config",
        f"{NAMED}/stats",
        "/v2/repository/index",
        "/v2/anything/else",
    ],
)
def test_what_is_not_there_is_404_in_the_protocols_form(served: Served, path: str) -> None:
    error(served.get(path), 404)


def test_other_refusals_have_the_protocols_form(served: Served) -> None:
    body = {"inputs": [obs()]}
    served.refusal(404, body, f"{NAMED}/versions/2/infer")
    served.refusal(404, body, "/v2/models/unknown/infer")
    assert "chat" in served.refusal(400, body, "/v2/models/chat/infer")
    error(served.get("/v2/models/chat"), 400)
    error(httpx2.get(f"{served.process.url}{NAMED}"), 401)
    error(httpx2.post(f"{served.process.url}{INFER}", json=body), 401)
    error(httpx2.delete(f"{served.process.url}/v2", headers=KEY), 405)
    assert "obs" in served.refusal(400, {"inputs": [obs(name="x")]})
    assert "inputs.obs" in served.refusal(400, {"inputs": [obs(OBS * np.nan)]})
    for raw in (b"", b"{", b"[]"):
        served.refusal(400, raw)


def test_bad_bodies_are_refused_and_hurt_nobody(served: Served) -> None:
    body, headers = raw_body()
    served.refusal(400, body)
    served.refusal(400, body[:-1], **headers)
    served.refusal(400, body + b"\0", **headers)
    for length in ("-1", "0", str(len(body) + 1), "9" * 400, "a"):
        assert HEADER_LENGTH in served.refusal(400, body, **{HEADER_LENGTH: length})
    encoded = {"content-encoding": "gzip"}
    served.refusal(400, body, **headers, **encoded)
    served.refusal(400, body, **headers, **{"content-encoding": "br"})
    served.refusal(413, gzip.compress(bytes(1 << 26)), **encoded)
    served.refusal(413, bytes(9 << 20))
    assert served.post(INFER, body, **headers).is_success


def test_a_body_of_a_gigabyte_is_refused_by_its_length(served: Served) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\n"
    parts = urlsplit(served.process.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(f"{head}content-length: {1 << 30}\r\n\r\n".encode())
        answer = b""
        while b"}" not in answer:
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'{"error":' in answer
