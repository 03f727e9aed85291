"""Nets and policies over HTTP, in every form of tensors."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load, save

from mlx_parallm.adapters.safetensors import read_file, write_file
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.client import RequestFailedError, SyncRLClient
from tests.nets import json_numpy, write_bfloat16, write_image
from tests.server_process import ServerProcess

GOLDEN = Path(__file__).parents[1] / "golden" / "policies"
POLICIES = ("ppo_mlp", "recurrent", "maskable", "ppo_dict_normalized", "sac", "td3")
FILE = "application/x-safetensors"
ACT, PREDICT = "/v1/rl/act", "/v1/predict"
OBS = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
TIMED = np.linspace(-1, 1, 2 * 4 * 5, dtype=np.float32).reshape(2, 4, 5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    made = tmp_path_factory.mktemp("nets")
    folders = [str(GOLDEN / name) for name in POLICIES]
    folders += [str(write_bfloat16(made)), str(write_image(made))]
    process = ServerProcess("--model", *folders, "--api-key", "one", "--api-key", "two")
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    headers = {"authorization": "Bearer one"}
    with httpx2.Client(base_url=server.url, headers=headers) as connected:
        yield connected


def post(client: httpx2.Client, path: str, body: Mapping[str, Any], **headers: str) -> Any:
    """Return the JSON of an answer to a body, in which arrays are written as json-numpy does."""
    response = client.post(
        path,
        content=json.dumps(body, default=json_numpy).encode(),
        headers={"content-type": "application/json"} | headers,
    )
    assert response.status_code == 200, response.text
    return response.json()


def post_file(
    client: httpx2.Client,
    path: str,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    **headers: str,
) -> httpx2.Response:
    response = client.post(
        path,
        content=save(dict(tensors), dict(metadata)),
        headers={"content-type": FILE} | headers,
    )
    assert response.status_code == 200, response.text
    return response


def metadata_of(file: bytes) -> dict[str, str]:
    size = int.from_bytes(file[:8], "little")
    return json.loads(file[8 : 8 + size])["__metadata__"]


def array_of(value: Any) -> np.ndarray:
    """Return a tensor of an answer in either form of JSON."""
    array = np.frombuffer(base64.b64decode(value["__numpy__"]), value["dtype"])
    return array.reshape(value["shape"])


@pytest.mark.parametrize("name", ["ppo_mlp", "sac"])
def test_all_forms_have_the_same_answer_bit_for_bit(client: httpx2.Client, name: str) -> None:
    fields = {"model": name, "seed": 7, "return": ["log_probs", "dist"]}
    numbers = post(client, ACT, {**fields, "observations": OBS.tolist()})
    objects = post(client, ACT, {**fields, "observations": OBS})
    metadata = {"model": name, "seed": "7", "return": '["log_probs", "dist"]'}
    file = load(post_file(client, ACT, {"observations": OBS}, metadata).content)
    for field in ("actions", "actions_for_env", "log_probs"):
        expected = file[field]
        assert array_of(objects[field]).tobytes() == expected.tobytes()
        assert np.array(numbers[field], expected.dtype).tobytes() == expected.tobytes()
    for role, value in objects["dist"].items():
        assert array_of(value).tobytes() == file[f"dist.{role}"].tobytes()


def test_accept_chooses_the_form_of_the_answer(client: httpx2.Client) -> None:
    body = {"model": "ppo_mlp", "observations": OBS.tolist(), "seed": 1}
    response = client.post(ACT, json=body, headers={"accept": FILE})
    assert response.headers["content-type"] == FILE
    tensors = load(response.content)
    metadata = metadata_of(response.content)
    answer = post_file(
        client,
        ACT,
        {"obs": OBS},
        {"model": "ppo_mlp", "seed": "1"},
        accept="application/json",
    ).json()
    assert answer["actions"] == tensors["actions"].tolist()
    assert metadata == {"model": "ppo_mlp", "policy_version": answer["policy_version"]}


def test_a_seed_draws_the_same_actions_in_every_batch(client: httpx2.Client) -> None:
    many = np.tile(OBS, (20, 1))
    rows = post(client, ACT, {"model": "ppo_mlp", "observations": many.tolist(), "seed": 5})
    first = post(client, ACT, {"model": "ppo_mlp", "observations": OBS.tolist(), "seed": 5})
    for field in ("actions", "log_probs", "value_estimates"):
        assert rows[field][:3] == first[field]
    assert len(set(rows["actions"])) > 1


def test_old_actions_are_judged_as_they_were_drawn(client: httpx2.Client) -> None:
    for name in ("ppo_mlp", "sac"):
        body = {"model": name, "observations": OBS.tolist(), "seed": 5}
        drawn = post(client, ACT, body)
        judged = post(client, ACT, {**body, "seed": 6, "actions": drawn["actions"]})
        assert judged["actions"] == drawn["actions"]
        np.testing.assert_allclose(judged["log_probs"], drawn["log_probs"], atol=1e-4)


def test_masks_forbid_choices(client: httpx2.Client) -> None:
    mask = np.zeros((3, 5), bool)
    mask[:, 2] = True
    body = {"model": "maskable", "observations": OBS.tolist(), "action_mask": mask.tolist()}
    answer = post(client, ACT, body)
    assert answer["actions"] == [2, 2, 2]
    np.testing.assert_allclose(answer["log_probs"], 0, atol=1e-6)


def test_dict_observations_come_by_name(client: httpx2.Client) -> None:
    near, far = OBS, np.zeros((3, 2, 3), np.float32)
    body = {"model": "ppo_dict_normalized", "deterministic": True}
    numbers = post(client, ACT, {**body, "observations": {"near": near.tolist(), "far": far}})
    file = post_file(
        client,
        ACT,
        {"near": near, "observations.far": far},
        {"model": "ppo_dict_normalized", "deterministic": "true"},
    )
    assert array_of(numbers["actions"]).tolist() == load(file.content)["actions"].tolist()


def test_images_are_bytes(client: httpx2.Client) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 1, 6, 6), np.uint8)
    body = {"model": "image", "deterministic": True, "return": ["entropy"]}
    numbers = post(client, ACT, {**body, "observations": images.tolist()})
    objects = post(client, ACT, {**body, "observations": images})
    rows = post(client, ACT, {**body, "observations": list(images)})
    assert array_of(objects["entropy"]).tolist() == numbers["entropy"]
    assert rows == objects


def test_steps_with_returned_state_are_one_chunk(client: httpx2.Client) -> None:
    starts = np.zeros((2, 4), bool)
    starts[1, 2] = True
    body = {"model": "recurrent", "deterministic": True}
    whole = post(
        client, ACT, {**body, "observations": TIMED.tolist(), "episode_start": starts.tolist()}
    )
    assert np.shape(whole["actions"]) == (2, 4)
    state: Any = None
    values: list[Any] = []
    for time in range(4):
        step = {"observations": TIMED[:, time].tolist(), "hidden_states": state}
        answer = post(client, ACT, {**body, **step, "episode_start": starts[:, time].tolist()})
        assert np.shape(answer["actions"]) == (2,)
        state = answer["new_hidden_states"]
        values.append(answer["value_estimates"])
    np.testing.assert_allclose(np.stack(values, 1), whole["value_estimates"], atol=1e-6)
    for name, array in state.items():
        np.testing.assert_allclose(array, whole["new_hidden_states"][name], atol=1e-6)
    file = post_file(
        client,
        ACT,
        {"obs": TIMED, "episode_start": starts},
        {"model": "recurrent", "deterministic": "true"},
    )
    tensors = load(file.content)
    assert tensors["value_estimates"].tolist() == whole["value_estimates"]


def test_state_is_kept_for_a_sequence_of_one_client(client: httpx2.Client) -> None:
    body = {"model": "recurrent", "deterministic": True, "sequence_id": "s"}
    chunk = {"model": "recurrent", "deterministic": True, "observations": TIMED.tolist()}
    whole = post(client, ACT, chunk)
    for time in range(4):
        step = {"observations": TIMED[:, time].tolist(), "sequence_start": time == 0}
        answer = post(client, ACT, {**body, **step, "sequence_end": time == 3})
        assert "new_hidden_states" not in answer
        assert answer["state_has_other_weights"] is False
        expected = np.array(whole["value_estimates"])[:, time]
        np.testing.assert_allclose(answer["value_estimates"], expected, atol=1e-6)
        # Another client's sequence has the same name, and nothing in common.
        other = client.post(
            ACT,
            json={**body, "observations": TIMED[:, time].tolist()},
            headers={"authorization": "Bearer two"},
        )
        assert other.status_code == 409
        assert other.json()["error"]["param"] == "sequence_id"
    ended = client.post(ACT, json={**body, "observations": TIMED[:, 0].tolist()})
    assert ended.status_code == 409


def test_predictions_have_the_outputs_of_the_signature(client: httpx2.Client) -> None:
    body = {"model": "ppo_mlp", "inputs": {"obs": OBS.tolist()}}
    answer = post(client, PREDICT, body)
    assert answer.keys() == {"model", "policy_version", "outputs"}
    assert np.shape(answer["outputs"]["logits"]) == (3, 4)
    some = post(client, PREDICT, {**body, "outputs": ["value"]})
    assert some["outputs"] == {"value": answer["outputs"]["value"]}
    file = post_file(client, PREDICT, {"obs": OBS}, {"model": "ppo_mlp"})
    tensors = load(file.content)
    assert tensors.keys() == {"logits", "value"}
    assert tensors["logits"].tolist() == answer["outputs"]["logits"]
    timed = post(client, PREDICT, {"model": "recurrent", "inputs": {"obs": TIMED.tolist()}})
    assert np.shape(timed["outputs"]["logits"]) == (2, 4, 4)
    assert timed["new_hidden_states"].keys()


def test_bfloat16_survives_files(client: httpx2.Client) -> None:
    bits = np.array([[0x3F81, 0xC0A1, 0x3E01, 0x4000]], np.uint16)
    raw = write_file({"x": HostTensor(bits, is_bfloat16=True)}, {"model": "half"})
    response = client.post(PREDICT, content=raw, headers={"content-type": FILE})
    tensor = read_file(response.content, param="").tensors["y"]
    assert tensor.is_bfloat16
    # Twice a number has an exponent that is greater by one.
    assert tensor.array.tolist() == [[0x4001, 0xC121, 0x3E81, 0x4080]]
    # JSON has no infinite numbers.
    body = {"model": "half", "inputs": {"x": [[1.0, 2.0, float("inf"), float("nan")]]}}
    assert post(client, PREDICT, body)["outputs"] == {"y": [[None] * 4]}


def test_the_client_acts_and_predicts(client: httpx2.Client, server: ServerProcess) -> None:
    body = {"model": "recurrent", "deterministic": True, "observations": TIMED.tolist()}
    whole = post(client, ACT, {**body, "return": ["log_probs", "dist"]})
    state: Any = None
    with SyncRLClient(server.url, api_key="one") as connected:
        for time in range(4):
            acted = connected.nets.act(
                {"obs": TIMED[:, time]}, model="recurrent", deterministic=True, hidden_states=state
            )
            assert acted.actions.tolist() == [row[time] for row in whole["actions"]]
            state = acted.new_hidden_states
        acted = connected.nets.act(
            OBS, model="ppo_mlp", returns=["dist"], action_mask=np.eye(4, dtype=bool)[:3]
        )
        assert np.asarray(acted.actions).tolist() == [0, 1, 2]
        assert (acted.dist["logits"].shape, acted.log_probs) == ((3, 4), None)
        predicted = connected.nets.predict({"obs": OBS}, model="ppo_mlp", outputs=["value"])
        expected = post(client, PREDICT, {"model": "ppo_mlp", "inputs": {"obs": OBS.tolist()}})
        assert predicted.outputs.keys() == {"value"}
        assert predicted.outputs["value"].tolist() == expected["outputs"]["value"]
        assert predicted.policy_version == expected["policy_version"]
        kept = connected.nets.act(
            {"obs": TIMED}, model="recurrent", sequence_id="c", sequence_start=True
        )
        assert kept.state_has_other_weights is False
        assert not kept.new_hidden_states
        with pytest.raises(RequestFailedError, match=r"observations\.obs") as refusal:
            connected.nets.act(OBS[:, :2], model="ppo_mlp")
        assert refusal.value.param == "observations"


GOOD: dict[str, Any] = {"model": "ppo_mlp", "observations": OBS.tolist()}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "why"),
    [
        (ACT, {}, 400, "observations", "Field required"),
        (ACT, GOOD | {"model": "none"}, 404, "model", "does not exist"),
        (ACT, GOOD | {"observations": [[1, 2]]}, 400, "observations", "obs: float32 [rows, 5]"),
        (ACT, GOOD | {"observations": [["a"]]}, 400, "observations", "not a number"),
        (ACT, GOOD | {"observations": [[float("nan")] * 5]}, 400, "observations", "NaN"),
        (ACT, GOOD | {"observations": [[1e999] * 5]}, 400, "observations", "infinite"),
        (ACT, GOOD | {"action_mask": [[0] * 4] * 3}, 400, "action_mask", "every choice of row 0"),
        (ACT, GOOD | {"actions": [9, 9, 9]}, 400, "actions", "beyond the 4"),
        (ACT, GOOD | {"return": ["everything"]}, 400, "return", "'values'"),
        (ACT, GOOD | {"sequence_id": "s"}, 400, "sequence_id", "no state"),
        (PREDICT, {"model": "ppo_mlp", "inputs": {}}, 400, "inputs", "lacks 'obs'"),
        (PREDICT, {"model": "ppo_mlp", "inputs": [1]}, 400, "inputs", "dictionary"),
        (PREDICT, {"model": "ppo_mlp", "inputs": {"obs": []}}, 400, "inputs", "shape [0]"),
    ],
)
def test_refusals_name_the_field(
    client: httpx2.Client, path: str, body: Any, status: int, param: str, why: str
) -> None:
    headers = {"content-type": "application/json"}
    response = client.post(path, content=json.dumps(body).encode(), headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert why in error["message"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"{]", "application/json", 400),
        (b"{}", "text/plain", 400),
        (b"", FILE, 400),
        ((2**40).to_bytes(8, "little"), FILE, 400),
        (b"0" * (64 << 20), FILE, 413),
        (b"0" * (64 << 20), "application/json", 413),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(
    client: httpx2.Client, content: bytes, kind: str, status: int
) -> None:
    response = client.post(ACT, content=content, headers={"content-type": kind})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
    assert post(client, ACT, GOOD)["actions"]


def test_unknown_fields_are_told(client: httpx2.Client) -> None:
    response = client.post(ACT, json=GOOD | {"determinstic": True})
    assert response.headers["x-ignored-fields"] == "determinstic"


def test_other_routes_say_what_a_net_is_for(client: httpx2.Client) -> None:
    response = client.post("/v1/completions", json={"model": "ppo_mlp", "prompt": "x"})
    assert response.status_code == 400
    assert "/v1/predict" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [ACT, "/v2/models/ppo_mlp/infer"])
def test_a_client_that_leaves_ends_its_request(
    client: httpx2.Client, server: ServerProcess, path: str
) -> None:
    body: dict[str, Any] = {
        "name": "obs",
        "datatype": "FP32",
        "shape": [3, 5],
        "data": OBS.tolist(),
    }
    headers = {"authorization": "Bearer one", "content-type": "application/json"}
    assert client.post("/pause", params={"mode": "keep"}).status_code == 200
    leaving = HTTPConnection("127.0.0.1", server.port)
    leaving.request("POST", path, json.dumps(GOOD | {"inputs": [body]}), headers)
    while client.get("/load").json()["server_load"] != 1:
        pass
    leaving.close()
    while client.get("/load").json()["server_load"] != 0:
        pass
    assert client.post("/resume").status_code == 200
    assert post(client, ACT, GOOD)["actions"]
