"""The routes of weights, memory and fleets in all dialects, over a scripted engine."""

from __future__ import annotations

import base64
import json
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.http.uploads import BodyDigest
from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.status import Readiness
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import InvalidRequestError, OutOfMemoryError
from mlx_parallm.types.request import WeightsVersion
from tests.fake_control import FakeControl
from tests.unit.api.control.test_adapters import BOTH, ScriptedEngine, call

DATA = encode_safetensors({"model.norm.weight": np.ones(4, np.float32)})
OTHER = encode_safetensors({"lm_head.weight": np.ones((2, 4), np.int32)})
RAW = {"content-type": "application/octet-stream"}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "body",
    [
        {"content": DATA, "headers": RAW, "params": {"version": "v", "model": "alias"}},
        {"content": DATA, "headers": {**RAW, "x-weights-version": "v", "x-weights-model": "alias"}},
        {"files": {"weights": ("x", DATA)}, "data": {"weight_version": "v", "model": "alias"}},
        {"json": {"tensors": b64(DATA), "version": "v", "model": "alias"}},
    ],
)
async def test_tensors_come_in_any_body(body: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    response = await call(engine, "POST", "/update_weights", **body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["message"], answer["weight_version"]) == ("Weights updated", "v")
    ((name, arguments),) = engine.control.calls
    update: WeightsUpdate = arguments["update"]
    assert (name, arguments["model"], update.version) == ("update_weights", "alias", "v")
    assert update.tensors is not None
    assert update.tensors["model.norm.weight"].shape == (4,)
    assert engine.control.digests == [sha256(DATA).hexdigest()]


async def test_several_files_have_one_digest() -> None:
    engine = ScriptedEngine()
    body = {"serialized_named_tensors": [b64(DATA), b64(OTHER)], "load_format": "safetensors"}
    response = await call(engine, "POST", "/update_weights_from_tensor", json=body)
    assert response.status_code == 200, response.text
    assert engine.control.digests == [sha256(DATA + OTHER).hexdigest()]


class WithoutMemory(FakeControl):
    """Lacks memory for every update: as the engine says it, or while a body is read."""

    def __init__(self, problem: Exception) -> None:
        super().__init__()
        self.problem = problem

    def _new_version(self, label: str | None, expected: str | None) -> WeightsVersion:
        del label, expected
        raise self.problem


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/update_weights", {"content": DATA, "headers": RAW}),
    ("/update_weights", {"files": {"weights": ("x", DATA)}}),
    ("/update_weights", {"json": {"tensors": b64(DATA)}}),
    ("/update_weights", {"json": {"weight_dir": "/w/7"}}),
    ("/update_weights_from_disk", {"json": {"model_path": "/w/7"}}),
    (
        "/update_weights_from_tensor",
        {"json": {"serialized_named_tensors": [b64(DATA)], "load_format": "safetensors"}},
    ),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_an_update_without_memory_is_503(path: str, body: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    engine.control = WithoutMemory(OutOfMemoryError("It needs 8 bytes, and 7 bytes are free."))
    response = await call(engine, "POST", path, **body)
    assert response.status_code == 503, response.text
    assert "needs 8 bytes, and 7 bytes are free" in response.text
    assert "out_of_memory" in response.text
    engine.control = WithoutMemory(MemoryError())
    response = await call(engine, "POST", path, **body)
    assert response.status_code == 503, response.text
    length = response.request.headers["content-length"]
    assert f"has {length} bytes" in response.text
    assert "bytes are free" in response.text


CUT = {"content": DATA[:9], "headers": RAW}
ENDS: list[tuple[str, dict[str, Any], Exception | None, int]] = [
    *((path, body, None, 200) for path, body in FORMS if path != "/update_weights_from_disk"),
    ("/update_weights", {"content": DATA, "headers": RAW}, InvalidRequestError("It is bad."), 400),
    ("/update_weights", CUT, None, 400),
    ("/update_weights", {"content": DATA, "headers": {"content-type": "text/plain"}}, None, 400),
    ("/update_weights_from_tensor", {"json": {"serialized_named_tensors": []}}, None, 400),
]


@pytest.mark.parametrize(("path", "body", "problem", "status"), ENDS)
async def test_no_body_is_hashed_after_its_request(
    path: str,
    body: dict[str, Any],
    problem: Exception | None,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[BodyDigest] = []
    close = BodyDigest.close

    def noted(hashing: BodyDigest) -> None:
        closed.append(hashing)
        close(hashing)

    monkeypatch.setattr(BodyDigest, "close", noted)
    engine = ScriptedEngine()
    engine.control = FakeControl() if problem is None else WithoutMemory(problem)
    response = await call(engine, "POST", path, **body)
    assert response.status_code == status, response.text
    assert len(closed) == 1


async def test_prime_rl_names_a_folder() -> None:
    engine = ScriptedEngine()
    response = await call(engine, "POST", "/update_weights", json={"weight_dir": "/w/7"})
    assert response.json()["weight_version"] == "1"
    assert engine.control.calls == [
        ("update_weights_from_folder", {"path": "/w/7", "model": None, "version": None})
    ]
    body = {"weight_dir": "/w/7", "expected_version": "9"}
    response = await call(engine, "POST", "/update_weights", json=body)
    assert response.status_code == 412
    assert engine.control.weights.label == "1"


TRANSFERS = [
    ("/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}}),
    ("/init_weight_transfer_engine", {"init_info": {}}),
    ("/init_weights_update_group", {"master_address": "x"}),
    ("/destroy_weights_update_group", {"group_name": "x"}),
    ("/update_weights_from_distributed", {"names": []}),
    ("/update_weights_from_ipc", {"zmq_handles": {}}),
    ("/collective_rpc", {"method": "x"}),
]


@pytest.mark.parametrize(("path", "body"), TRANSFERS)
async def test_transfers_between_gpus_name_the_alternative(path: str, body: Any) -> None:
    engine = ScriptedEngine()
    response = await call(engine, "POST", path, json=body)
    assert response.status_code == 501
    assert "/update_weights" in response.json()["error"]["message"]
    assert not engine.control.calls


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"json": {}}, "weight_dir"),
        ({"json": {"weight_dir": "/w", "tensors": b64(DATA)}}, "weight_dir"),
        ({"json": {"weight_dir": 7}}, "weight_dir"),
        ({"json": {"tensors": 7}}, "tensors"),
        ({"content": DATA[:-1], "headers": RAW}, "weights"),
        ({"content": b"\x80\x04c", "headers": RAW}, "weights"),
        ({"content": DATA, "headers": RAW, "params": {"version": ""}}, "version"),
    ],
)
async def test_a_bad_update_names_its_field(body: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine()
    response = await call(engine, "POST", "/update_weights", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not engine.control.calls


async def test_sglang_updates_from_disk() -> None:
    engine = ScriptedEngine()
    body = {
        "model_path": "/w/8",
        "weight_version": "8",
        "load_format": "auto",
        "flush_cache": True,
        "token_step": 3,
        "new_field": 1,
    }
    response = await call(engine, "POST", "/update_weights_from_disk", json=body)
    answer = response.json()
    assert (answer["success"], answer["num_paused_requests"]) == (True, 0)
    assert response.headers["x-ignored-fields"] == "new_field"
    assert engine.control.weights.label == "8"


async def test_sglang_updates_from_tensors_without_pickle() -> None:
    engine = ScriptedEngine()
    path = "/update_weights_from_tensor"
    body: dict[str, Any] = {
        "serialized_named_tensors": [b64(DATA), b64(OTHER)],
        "load_format": "safetensors",
        "weight_version": "9",
    }
    assert (await call(engine, "POST", path, json=body)).json()["success"] is True
    update: WeightsUpdate = engine.control.calls[0][1]["update"]
    assert set(update.tensors or ()) == {"model.norm.weight", "lm_head.weight"}
    for change in (
        {"load_format": None},
        {"load_format": "flattened_bucket"},
        {"serialized_named_tensors": []},
        {"serialized_named_tensors": [b64(b"\x80\x04cposix\nsystem\n")]},
        {"serialized_named_tensors": [b64(DATA), b64(DATA)]},
    ):
        response = await call(engine, "POST", path, json={**body, **change})
        assert response.status_code == 400, change
        assert response.json()["success"] is False
        assert response.json()["error"]["param"] == next(iter(change))
    assert len(engine.control.calls) == 1


async def test_a_version_is_named_at_the_end() -> None:
    engine = ScriptedEngine()
    sent = {"is_checkpoint_format": True}
    assert (await call(engine, "POST", "/start_weight_update", json=sent)).is_success
    assert (await call(engine, "POST", "/finish_weight_update", json={})).is_success
    assert (await call(engine, "GET", "/weight_info")).json() == {
        "weight_version": "default",
        "adapters": {},
    }
    sent = {"weight_version": "step-42"}
    assert (await call(engine, "POST", "/finish_weight_update", json=sent)).is_success
    answer = (await call(engine, "GET", "/get_weight_version")).json()
    assert answer["weight_version"] == "step-42"
    sent = {"new_version": "step-43"}
    answer = (await call(engine, "POST", "/update_weight_version", json=sent)).json()
    assert (answer["success"], answer["new_version"]) == (True, "step-43")
    for path in ("/model_info", "/server_info"):
        assert (await call(engine, "GET", path)).json()["weight_version"] == "step-43"


@pytest.mark.parametrize("path", ["/weight_info", "/get_weight_version"])
async def test_any_model_has_a_version(path: str) -> None:
    engine = ScriptedEngine()
    for query, label in (("", "default"), ("?model=alias", "default"), ("?model=net", "of net")):
        answer = (await call(engine, "GET", path + query)).json()
        assert answer["weight_version"] == label


@pytest.mark.parametrize("path", ["/weight_checker", "/weights_checker"])
async def test_each_model_has_a_snapshot(path: str) -> None:
    engine = ScriptedEngine()
    await call(engine, "POST", path, json={"action": "snapshot", "model": "alias"})
    for model, status in ((None, 200), ("alias", 200), ("net", 400)):
        body = {"action": "compare", "model": model}
        assert (await call(engine, "POST", path, json=body)).status_code == status
    await call(engine, "POST", path, json={"action": "snapshot", "model": "net"})
    for model in (None, "net"):
        body = {"action": "compare", "model": model}
        assert (await call(engine, "POST", path, json=body)).status_code == 200
    models = [arguments["model"] for name, arguments in engine.control.calls if name == "checksums"]
    assert models == ["org/fake", "org/fake", "org/fake", "net", "org/fake", "net"]


@pytest.mark.parametrize("path", ["/weight_checker", "/weights_checker"])
async def test_weights_are_compared(path: str) -> None:
    engine = ScriptedEngine()
    response = await call(engine, "POST", path, json={"action": "compare"})
    assert response.status_code == 400
    checksums = (await call(engine, "POST", path, json={"action": "checksum"})).json()["checksums"]
    assert checksums == {"a": "", "b": "same"}
    body = {"action": "compare", "baseline": {"a": "x", "b": "same", "c": "gone"}}
    answer = (await call(engine, "POST", path, json=body)).json()
    assert (answer["match"], answer["mismatches"]) == (False, ["a", "c"])
    await call(engine, "POST", path, json={"action": "snapshot"})
    answer = (await call(engine, "POST", path, json={"action": "compare"})).json()
    assert (answer["match"], answer["mismatches"]) == (True, [])
    await engine.control.set_version("2")
    answer = (await call(engine, "POST", path, json={"action": "compare"})).json()
    assert answer["mismatches"] == ["a"]
    response = await call(engine, "POST", path, json={"action": "reset"})
    assert response.status_code == 501


async def test_vllm_sleeps_and_wakes() -> None:
    engine = ScriptedEngine()
    answer = (await call(engine, "POST", "/sleep?level=1&mode=wait")).json()
    assert answer == {"status": "sleeping", "level": 1, "mode": "wait"}
    assert (await call(engine, "GET", "/is_sleeping")).json() == {"is_sleeping": True}
    answer = (await call(engine, "POST", "/wake_up?tags=weights&tags=scheduling")).json()
    assert answer == {"status": "sleeping", "tags": ["kv_cache"]}
    answer = (await call(engine, "POST", "/wake_up")).json()
    assert answer == {"status": "awake", "tags": []}
    assert (await call(engine, "GET", "/is_sleeping")).json() == {"is_sleeping": False}
    assert (await call(engine, "POST", "/sleep?level=3")).status_code == 400


@pytest.mark.parametrize(
    ("body", "level"),
    [
        ({}, 2),
        ({"json": {"tags": None}}, 2),
        ({"json": {"tags": ["weights", "kv_cache"]}}, 2),
        ({"json": {"tags": ["kv_cache"]}}, 1),
        ({"json": {"tags": ["cuda_graph"]}}, None),
    ],
)
async def test_sglang_releases_memory(body: dict[str, Any], level: int | None) -> None:
    engine = ScriptedEngine()
    assert (await call(engine, "POST", "/release_memory_occupation", **body)).json()["success"]
    slept = [options for name, options in engine.control.calls if name == "sleep"]
    assert slept == ([] if level is None else [{"level": level, "mode": PauseMode.KEEP}])
    assert (await call(engine, "POST", "/resume_memory_occupation", json={})).json()["success"]
    assert engine.control.sleep_level == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "http://here:8000"}, None),
        ({"url": "http://HERE:8000/", "worker_type": "regular", "priority": 50}, None),
        ({"url": "http://here:8001"}, "url"),
        ({"url": "http://there:8000"}, "url"),
        ({"url": "http://here:port"}, "url"),
        ({"url": "http://[x"}, "url"),
        ({"url": "here"}, "url"),
        ({"url": ""}, "url"),
        ({}, "url"),
        ({"url": "http://here:8000", "worker_type": "prefill"}, "worker_type"),
    ],
)
async def test_slime_tells_the_router_of_this_server(body: Any, param: str | None) -> None:
    engine = ScriptedEngine()
    response = await call(engine, "POST", "/workers", json=body)
    content = response.json()
    if param is None:
        known = (await call(engine, "GET", "/workers")).json()["workers"][0]
        assert content == {"status": "accepted", "worker_id": known["id"], "url": known["url"]}
    else:
        assert (response.status_code, content["error"]["param"]) == (400, param)


async def test_loads_and_workers() -> None:
    engine = ScriptedEngine()
    content = (await call(engine, "GET", "/v1/loads?include=core")).json()
    (load,) = content["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["dp_rank"]) == (2, 1, 0)
    assert content["aggregate"]["total_reqs"] == 3
    assert (await call(engine, "GET", "/get_world_size?include_dp=true")).json() == {
        "world_size": 1
    }
    content = (await call(engine, "GET", "/workers")).json()
    assert [worker["url"] for worker in content["workers"]] == ["http://here:8000"]


async def test_loads_has_an_entry_for_each_engine() -> None:
    engine = ScriptedEngine()
    engine.states = [Readiness.READY, Readiness.STARTING]
    content = (await call(engine, "GET", "/v1/loads")).json()
    busy, starting = content["loads"]
    assert (busy["dp_rank"], busy["state"], busy["num_total_reqs"]) == (0, "ready", 3)
    assert (busy["num_waiting_tokens"], busy["token_usage"]) == (7, 0.25)
    assert (starting["dp_rank"], starting["state"]) == (1, "starting")
    assert {starting[name] for name in starting if name.startswith(("num_", "max_"))} == {0}
    assert content["aggregate"]["total_reqs"] == 3
    assert (await call(engine, "GET", "/get_load")).json() == [
        {
            "dp_rank": load["dp_rank"],
            "num_reqs": load["num_total_reqs"],
            "num_waiting_reqs": load["num_waiting_reqs"],
            "num_tokens": load["num_used_tokens"] + load["num_waiting_tokens"],
        }
        for load in (busy, starting)
    ]
    chosen = (await call(engine, "GET", "/v1/loads?dp_rank=0")).json()["loads"]
    assert chosen == [busy]
    refused = await call(engine, "GET", "/v1/loads?dp_rank=2")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dp_rank")
    assert (await call(engine, "GET", "/get_world_size")).json() == {"world_size": 2}
    without = await call(engine, "GET", "/get_world_size?include_dp=false")
    assert without.json() == {"world_size": 1}


async def test_trl_finds_what_it_needs() -> None:
    response = await call(ScriptedEngine(), "GET", "/server_info?config_format=json")
    known = response.json()["vllm_config"]
    assert known["lora_config"] == {"max_lora_rank": 256, "max_loras": 8, "max_cpu_loras": 64}
    assert known["parallel_config"]["data_parallel_size"] == 1
    assert known["model_config"]["dtype"].startswith("torch.")
    assert known["weight_transfer_config"] is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path, _ in TRANSFERS),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/workers"),
        ("POST", "/update_weights_from_tensor"),
        ("POST", "/start_weight_update"),
        ("POST", "/finish_weight_update"),
        ("POST", "/update_weight_version"),
        ("GET", "/weight_info"),
        ("POST", "/weight_checker"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_sleeping"),
        ("POST", "/release_memory_occupation"),
        ("POST", "/resume_memory_occupation"),
    ],
)
async def test_only_the_admin_key_opens_them(method: str, path: str) -> None:
    engine = ScriptedEngine()
    body = {"model_path": "/x", "new_version": "x", "action": "checksum"}
    response = await call(engine, method, path, config=BOTH, key="one-key", json=body)
    assert response.status_code == 401
    assert not engine.control.calls


async def test_weights_have_a_limit_of_their_own() -> None:
    small = ServerConfig(max_weights_bytes=len(DATA) - 2**16 - 1)
    response = await call(
        ScriptedEngine(), "POST", "/update_weights", config=small, content=DATA, headers=RAW
    )
    assert response.status_code == 413
    assert json.loads(response.text)["error"]["code"] == "request_too_large"
