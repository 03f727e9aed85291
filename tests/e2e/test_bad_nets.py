"""Bad requests and folders of nets: 4xx in each protocol's form, and nobody else is hurt."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import save

from mlx_parallm.api.nets.oip.body import HEADER_LENGTH
from tests.builders.nets import layer, linear, lstm_policy, mlp_policy, tensor, write_net
from tests.nets import json_numpy
from tests.process_memory import on_linux, resident_mb
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.slow, on_linux]

ACT, PREDICT, LOAD = "/v1/rl/act", "/v1/predict", "/v1/models/load"
JSON, FILE = "application/json", "application/x-safetensors"
OBS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
OTHER = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
#: MB: megabytes that the server's memory may grow by while it refuses.
MB = 48
GOOD: dict[str, Any] = {"model": "policy", "observations": OBS.tolist(), "seed": 3}


@dataclass(frozen=True)
class Bad:
    """A request that is refused.

    Attributes:
        path: of the route.
        content: the body.
        headers: beside the key.
        status: of the answer.
    """

    path: str
    content: bytes
    headers: dict[str, str]
    status: int = 400


def by_json(path: str, status: int = 400, **fields: Any) -> Bad:
    """Return a request by JSON, whose arrays are written as json-numpy does."""
    content = json.dumps({"model": "policy"} | fields, default=json_numpy).encode()
    return Bad(path, content, {"content-type": JSON}, status)


def by_file(path: str, status: int = 400, model: str = "policy", **tensors: Any) -> Bad:
    return Bad(path, save(tensors, {"model": model}), {"content-type": FILE}, status)


def by_oip(
    *tensors: dict[str, Any],
    behind: bytes = b"",
    net: str = "policy",
    status: int = 400,
    **more: Any,
) -> Bad:
    """Return a request of Open Inference Protocol, with bytes behind its object."""
    text = json.dumps({"inputs": list(tensors), **more}).encode()
    headers = {HEADER_LENGTH: str(len(text))} if behind else {}
    return Bad(f"/v2/models/{net}/infer", text + behind, headers, status)


def oip(array: np.ndarray, name: str = "obs", **changes: Any) -> dict[str, Any]:
    usual = {"name": name, "datatype": "FP32", "shape": list(array.shape)}
    return usual | {"data": array.ravel().tolist()} | changes


def raw(array: np.ndarray, size: int) -> dict[str, Any]:
    tensor = oip(array, parameters={"binary_data_size": size})
    return {name: value for name, value in tensor.items() if name != "data"}


#: ``BAD``: by what is wrong with them and by their form; each line has all forms.
BAD: dict[str, Bad] = {
    "shape, numbers": by_json(ACT, observations=OBS[:, :3].tolist()),
    "shape, json-numpy": by_json(ACT, observations=OBS[:, :3]),
    "shape, predict": by_json(PREDICT, inputs={"obs": OBS[:, :3]}),
    "shape, file": by_file(ACT, observations=OBS[:, :3]),
    "shape, OIP": by_oip(oip(OBS[:, :3])),
    "shape, OIP bytes": by_oip(raw(OBS[:, :3], 36), behind=bytes(36)),
    "dtype, numbers": by_json(ACT, observations=[["1"] * 4]),
    "dtype, json-numpy": by_json(ACT, observations=OBS.astype("c8")),
    "dtype, predict": by_json(PREDICT, model="places", inputs={"x": OBS[:, :2]}),
    "dtype, file": by_file(PREDICT, model="places", x=OBS[:, :2]),
    "dtype, OIP": by_oip(oip(OBS, datatype="INT32")),
    "dtype, OIP bytes": by_oip(raw(OBS, 48) | {"datatype": "FP16"}, behind=bytes(48)),
    "name, numbers": by_json(ACT, observations={"observation": OBS.tolist()}),
    "name, predict": by_json(PREDICT, inputs={"x": OBS.tolist()}),
    "name, file": by_file(PREDICT, x=OBS),
    "name, OIP": by_oip(oip(OBS, "x")),
    "rows, numbers": by_json(PREDICT, model="two", inputs={"a": [[1.0]], "b": [[1.0]] * 2}),
    "rows, json-numpy": by_json(PREDICT, model="two", inputs={"a": OBS[:1, :1], "b": OBS[:2, :1]}),
    "rows, file": by_file(PREDICT, model="two", a=OBS[:1, :1].copy(), b=OBS[:2, :1].copy()),
    "rows, OIP": by_oip(oip(OBS[:1, :1], "a"), oip(OBS[:2, :1], "b"), net="two"),
    "no rows, numbers": by_json(ACT, observations=[]),
    "no rows, json-numpy": by_json(ACT, observations=OBS[:0]),
    "no rows, file": by_file(ACT, observations=OBS[:0]),
    "no rows, OIP": by_oip(oip(OBS[:0])),
    "too many rows, json-numpy": by_json(ACT, observations=np.zeros((4097, 4), np.float32)),
    "too many rows, file": by_file(ACT, observations=np.zeros((4097, 4), np.float32)),
    "too many rows, OIP": by_oip(raw(np.zeros((4097, 4), np.float32), 65552), behind=bytes(65552)),
    "mask, numbers": by_json(ACT, observations=OBS, action_mask=[[False] * 2] * 3),
    "mask, json-numpy": by_json(ACT, observations=OBS, action_mask=np.zeros((3, 2), bool)),
    "mask, file": by_file(ACT, observations=OBS, action_mask=np.zeros((3, 2), bool)),
    "row that is no choice, numbers": by_json(PREDICT, model="places", inputs={"x": [[0, 9]]}),
    "row that is no choice, OIP": by_oip(
        oip(np.array([[0, 9]]), "x", datatype="INT64"), net="places"
    ),
    "sequence, act": by_json(ACT, 409, model="memory", observations=OTHER, sequence_id="none"),
    "sequence, predict": by_json(
        PREDICT, 409, model="memory", inputs={"obs": OTHER}, sequence_id="none"
    ),
    "sequence, OIP": by_oip(
        oip(OTHER), net="memory", status=409, parameters={"sequence_id": "none"}
    ),
    "sequence without state, act": by_json(ACT, observations=OBS, sequence_id="s"),
    "sequence without state, OIP": by_oip(oip(OBS), parameters={"sequence_id": 1}),
    "bytes beyond the body": by_oip(raw(OBS, 48), behind=bytes(47)),
    "bytes far beyond the body": by_oip(raw(OBS, 2**62), behind=bytes(48)),
    "header beyond the body": Bad(
        "/v2/models/policy/infer", b"{}", {HEADER_LENGTH: "9999999999999999999999"}
    ),
    "file that ends early": Bad(ACT, save({"observations": OBS})[:-1], {"content-type": FILE}),
    "header of a file beyond it": Bad(ACT, b"\xff" * 8 + b"{}", {"content-type": FILE}),
    "no such net, act": by_json(ACT, 404, model="none", observations=OBS),
    "no such net, OIP": by_oip(oip(OBS), net="none", status=404),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nets")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    two = {
        "inputs": [tensor("a", 1), tensor("b", 1)],
        "outputs": [tensor("y", 1)],
        "layers": [layer("y", "add", "a", "b")],
    }
    places = {
        "inputs": [tensor("x", 2, dtype="int64")],
        "outputs": [tensor("y", 2, 3)],
        "layers": [layer("y", "embedding", "x", num_embeddings=5, embedding_dim=3)],
    }
    configs = {"policy": mlp_policy(), "memory": lstm_policy(), "two": two, "places": places}
    folders = [write_net(root / name, config) for name, config in configs.items()]
    names = [f"{folder}={folder.name}" for folder in folders]
    process = ServerProcess(
        *("--model", *map(str, folders), "--served-model-name", *names),
        *("--allowed-model-roots", str(root)),
    )
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url) as connected:
        yield connected


def act(client: httpx2.Client) -> Any:
    answer = client.post(ACT, json=GOOD)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(bad: Bad, answer: httpx2.Response) -> str:
    """Return the sentence of a refusal that has its status and its protocol's form."""
    assert answer.status_code == bad.status, answer.text
    content = answer.json()
    if bad.path.startswith("/v2"):
        assert list(content) == ["error"]
        return content["error"]
    assert content.keys() == {"error"}
    assert content["error"].keys() == {"message", "type", "param", "code"}
    return content["error"]["message"]


def refuse(client: httpx2.Client, bad: Bad) -> str:
    return check(bad, client.post(bad.path, content=bad.content, headers=bad.headers))


@pytest.fixture
def grown_mb(server: ServerProcess) -> Callable[[], float]:
    """Return a function that says by how many megabytes the server has grown meanwhile."""
    before = resident_mb(server.process.pid)
    return lambda: resident_mb(server.process.pid) - before


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_in_the_form_of_their_protocol(
    client: httpx2.Client, name: str
) -> None:
    before = act(client)
    said = refuse(client, BAD[name])
    assert 10 < len(said) < 1000
    assert act(client) == before


def test_refusals_hurt_nobody_and_keep_no_memory(
    client: httpx2.Client, server: ServerProcess, grown_mb: Callable[[], float]
) -> None:
    expected, is_over = act(client), Event()

    def act_beside() -> int:
        count = 0
        with httpx2.Client(base_url=server.url) as beside:
            while not is_over.is_set():
                assert act(beside) == expected
                count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(act_beside) for _ in range(4)]
        try:
            for _ in range(20):
                for bad in BAD.values():
                    refuse(client, bad)
        finally:
            is_over.set()
        assert all(each.result() > 0 for each in beside)
    assert grown_mb() < MB


@pytest.mark.parametrize("path", [ACT, PREDICT, "/v2/models/policy/infer"])
@pytest.mark.parametrize("kind", [JSON, FILE])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_of_a_gigabyte_are_refused(
    client: httpx2.Client,
    server: ServerProcess,
    grown_mb: Callable[[], float],
    path: str,
    kind: str,
    is_chunked: bool,
) -> None:
    size = "transfer-encoding: chunked" if is_chunked else f"content-length: {1 << 30}"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n{size}\r\n\r\n"
    chunk, num_sent = b"100000\r\n" + b"1" * (1 << 20) + b"\r\n", 0
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode())
        # The connection is closed long before all chunks are sent.
        with suppress(OSError):
            while is_chunked and num_sent < 1 << 10:
                connection.sendall(chunk)
                num_sent += 1
        with suppress(OSError):
            assert b" 413 " in connection.makefile("rb").readline()
    assert num_sent < 128
    assert act(client)["actions"]
    assert grown_mb() < MB


def test_ten_thousand_sequences_of_a_client_keep_to_their_share(
    client: httpx2.Client, grown_mb: Callable[[], float]
) -> None:
    def step(number: int, *, is_start: bool) -> int:
        body = by_json(
            ACT,
            model="memory",
            observations=OTHER,
            sequence_id=f"many-{number}",
            sequence_start=is_start,
        )
        return client.post(body.path, content=body.content, headers=body.headers).status_code

    with ThreadPoolExecutor(16) as pool:
        statuses = set(pool.map(lambda number: step(number, is_start=True), range(10_000)))
    assert statuses == {200}
    metrics = client.get("/metrics").text
    assert 'mlx_parallm:net_sequences{model_name="memory"} 2048.0\n' in metrics
    assert step(0, is_start=False) == 409
    assert step(9_999, is_start=False) == 200
    assert grown_mb() < MB


def cyclic() -> dict[str, Any]:
    config = mlp_policy()
    config["layers"][0]["inputs"] = ["pi.1.tanh"]
    return config


def wider() -> dict[str, Any]:
    config = mlp_policy()
    config["layers"].append(linear("more", "obs", 4, 4))
    return config


def many_layers(count: int) -> dict[str, Any]:
    layers = [layer(f"l{number}", "tanh", "obs") for number in range(count)]
    return {"inputs": [tensor("obs", 4)], "outputs": [tensor("l0", 4)], "layers": layers}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    write_net(folder)
    content = {"model_type": "mlx_parallm_net", **config}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


#: ``FOLDERS``: what a folder has, and what its refusal says.
FOLDERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "cycle": (cyclic, "it reads 'pi.1.tanh', which comes after it"),
    "weights of another shape": (lambda: mlp_policy(width=32), "it must be"),
    "missing weights": (wider, "is missing"),
    "a million layers": (lambda: many_layers(10**6), "a net's may have 4 MiB"),
    "layers up to the size": (lambda: many_layers(50_000), "has 50000 entries"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_no_net_are_refused(
    client: httpx2.Client, root: Path, grown_mb: Callable[[], float], name: str
) -> None:
    make, said = FOLDERS[name]
    folder = write_config(root / name.replace(" ", "-"), make())
    before = act(client)
    answer = client.post(LOAD, json={"model": str(folder)})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "model"
    assert str(folder) in answer.json()["error"]["message"]
    assert said in answer.json()["error"]["message"]
    assert act(client) == before
    assert grown_mb() < MB
