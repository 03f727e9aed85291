"""The routes of adapters and pauses in all dialects, over a scripted engine."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

OPEN = ServerConfig()
BOTH = ServerConfig(api_keys=("one-key",), admin_api_keys=("admin-key",))
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
NAME = "base_model.model.model.layers.0.self_attn.q_proj"


def tensors(value: float = 1.0, rank: int = 2) -> dict[str, np.ndarray]:
    return {
        f"{NAME}.lora_A.weight": np.full((rank, 8), value, np.float32),
        f"{NAME}.lora_B.weight": np.full((8, 2), 0.5, np.float32),
    }


DATA = encode_safetensors(tensors())


class ScriptedEngine(FakeEngine):
    """An engine with the applications that serve it."""

    def __init__(self) -> None:
        super().__init__()
        self.apps: dict[ServerConfig, FastAPI] = {}


async def call(
    engine: ScriptedEngine,
    method: str,
    path: str,
    *,
    config: ServerConfig = OPEN,
    key: str = "",
    **more: Any,
) -> httpx2.Response:
    # To make one takes a while.
    if (apps := engine.apps).get(config) is None:
        apps[config] = make_app(engine, config)
    transport = httpx2.ASGITransport(apps[config])
    headers = {"authorization": f"Bearer {key}"} if key else {}
    headers |= more.pop("headers", {})
    async with httpx2.AsyncClient(transport=transport, base_url="http://here:8000") as client:
        return await client.request(method, path, headers=headers, **more)


def raw(**fields: str) -> dict[str, Any]:
    return {
        "content": DATA,
        "headers": {"content-type": "application/octet-stream"},
        "params": {"name": "p", "config": json.dumps(CONFIG), **fields},
    }


def in_headers(**fields: str) -> dict[str, Any]:
    upload = {"name": "p", "config": json.dumps(CONFIG), **fields}
    headers = {f"x-adapter-{name.replace('_', '-')}": value for name, value in upload.items()}
    return {"content": DATA, "headers": {"content-type": "application/x-safetensors", **headers}}


def form(**fields: str) -> dict[str, Any]:
    files = {
        "adapter_model": ("adapter_model.safetensors", DATA),
        "adapter_config": ("adapter_config.json", json.dumps(CONFIG).encode()),
    }
    return {"files": files, "data": {"name": "p", **fields}}


def as_json(**fields: str) -> dict[str, Any]:
    encoded = base64.b64encode(DATA).decode()
    return {"json": {"name": "p", "tensors": encoded, "config": CONFIG, **fields}}


@pytest.mark.parametrize("path", ["/v1/update_adapter_weights", "/update_adapter_weights"])
@pytest.mark.parametrize("make", [raw, in_headers, form, as_json])
async def test_every_form_of_an_upload_is_the_same_adapter(path: str, make: Any) -> None:
    engine = ScriptedEngine()
    body = make(version="step-3", model="alias")
    response = await call(engine, "POST", path, **body)
    assert response.status_code == 200, response.text
    (name, arguments), *_ = engine.control.calls
    upload: AdapterUpload = arguments["upload"]
    assert (name, arguments["model"]) == ("load_adapter", "alias")
    assert (upload.name, upload.version, upload.replaces) == ("p", "step-3", True)
    assert upload.expected_version is None
    module = upload.weights.modules["model.layers.0.self_attn.q_proj"]
    assert (module.rank, module.scale) == (2, 2.0)
    answer = response.json()
    assert (answer["name"], answer["version"]) == ("p", "step-3")
    assert answer["digest"] == upload.weights.digest
    assert set(answer["timings"]) == {"receive_ms", "parse_ms", "live_ms"}
    assert answer["timings"]["live_ms"] >= answer["timings"]["parse_ms"] >= 0


@pytest.mark.parametrize("make", [raw, in_headers, form, as_json])
async def test_an_upload_may_expect_a_version(make: Any) -> None:
    engine = ScriptedEngine()
    assert (await call(engine, "POST", "/v1/update_adapter_weights", **make())).is_success
    body = make(expected_version="2")
    response = await call(engine, "POST", "/v1/update_adapter_weights", **body)
    error = response.json()["error"]
    assert response.status_code == 412
    assert (error["param"], error["code"]) == ("expected_version", "version_mismatch")


def without(body: dict[str, Any], *fields: str) -> dict[str, Any]:
    for part in ("params", "data", "files", "json"):
        body[part] = {k: v for k, v in body.get(part, {}).items() if k not in fields}
    return {part: value for part, value in body.items() if value}


def with_tensors(data: bytes) -> dict[str, Any]:
    return {**raw(), "content": data}


NOT_FINITE = encode_safetensors(tensors(float("nan")))
TORN = encode_safetensors(tensors(rank=3))
PICKLED = b"\x80\x04cposix\nsystem\n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (without(raw(), "name"), "name"),
        (without(raw(), "config"), "config"),
        (without(form(), "adapter_config"), "config"),
        (without(as_json(), "tensors"), "tensors"),
        (raw(config="{"), "config"),
        (raw(config="[]"), "config"),
        (raw(config='{"peft_type": "IA3"}'), "adapter_model"),
        (raw(name="x" * 257), "name"),
        (raw(pinned="perhaps"), "pinned"),
        (as_json(tensors="?"), "tensors"),
        (as_json(tensors=base64.b64encode(PICKLED).decode()), "tensors"),
        (with_tensors(b""), "adapter_model"),
        (with_tensors(DATA[:-1]), "adapter_model"),
        (with_tensors(DATA + b"x"), "adapter_model"),
        (with_tensors(NOT_FINITE), "adapter_model"),
        (with_tensors(TORN), "adapter_model"),
        (with_tensors(PICKLED), "adapter_model"),
        ({"json": [1]}, None),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, None),
        ({"content": b"[" * 9999, "headers": {"content-type": "application/json"}}, None),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, None),
    ],
)
async def test_a_bad_upload_names_its_field_and_changes_nothing(
    body: dict[str, Any], param: str | None
) -> None:
    engine = ScriptedEngine()
    response = await call(engine, "POST", "/v1/update_adapter_weights", **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.control.calls


async def test_an_upload_has_a_limit_of_its_own() -> None:
    small = ServerConfig(max_adapter_bytes=len(DATA) - 2**16 - 1, max_client_body_bytes=1)
    response = await call(
        ScriptedEngine(), "POST", "/v1/update_adapter_weights", config=small, **raw()
    )
    assert response.status_code == 413
    fitting = ServerConfig(max_adapter_bytes=len(DATA), max_client_body_bytes=1, max_body_bytes=1)
    response = await call(
        ScriptedEngine(), "POST", "/v1/update_adapter_weights", config=fitting, **raw()
    )
    assert response.status_code == 200


async def test_unknown_fields_of_an_upload_are_told() -> None:
    response = await call(
        ScriptedEngine(), "POST", "/v1/update_adapter_weights", **as_json(tensor_format="x")
    )
    assert response.headers["x-ignored-fields"] == "tensor_format"


async def test_adapters_are_listed_and_dropped() -> None:
    engine = ScriptedEngine()
    for name in ("a", "team/b@7"):
        await call(engine, "POST", "/v1/update_adapter_weights", **raw(name=name))
    listed = (await call(engine, "GET", "/v1/adapters")).json()
    assert [adapter["name"] for adapter in listed["data"]] == ["a", "team/b@7"]
    adapter = (await call(engine, "GET", "/v1/adapters/team/b@7")).json()
    assert adapter == listed["data"][1]
    models = (await call(engine, "GET", "/v1/models")).json()["data"]
    assert [(m["id"], m["parent"]) for m in models[2:]] == [
        ("a", "org/fake"),
        ("team/b@7", "org/fake"),
    ]
    response = await call(engine, "DELETE", "/v1/adapters/team/b@7")
    assert response.json() == {"object": "adapter", "name": "team/b@7", "deleted": True}
    for method in ("GET", "DELETE"):
        assert (await call(engine, method, "/v1/adapters/team/b@7")).status_code == 404


async def test_vllm_loads_and_unloads_in_its_words() -> None:
    engine = ScriptedEngine()
    body = {"lora_name": "p@3", "lora_path": "/x/3", "lora_int_id": 7}
    response = await call(engine, "POST", "/v1/load_lora_adapter", json=body)
    assert response.text == "Success: LoRA adapter 'p@3' added successfully."
    assert "x-ignored-fields" not in response.headers
    assert engine.control.calls[0][1]["replaces"] is False
    body = {"lora_name": "p@3", "lora_path": "/x/4", "load_inplace": True}
    await call(engine, "POST", "/v1/load_lora_adapter", json=body)
    assert engine.control.calls[1][1]["replaces"] is True
    body = {"lora_name": "p@3"}
    response = await call(engine, "POST", "/v1/unload_lora_adapter", json=body)
    assert response.text == "Success: LoRA adapter 'p@3' removed successfully."
    response = await call(engine, "POST", "/v1/unload_lora_adapter", json=body)
    assert response.status_code == 404
    body = {"lora_name": "p", "lora_path": "/x", "is_3d_lora_weight": True}
    response = await call(engine, "POST", "/v1/load_lora_adapter", json=body)
    assert response.status_code == 501


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/update_weights_from_lora"])
async def test_at_the_root_a_name_gets_what_lies_at_the_new_path(path: str) -> None:
    engine = ScriptedEngine()
    for step in (1, 2):
        body = {"lora_name": "p", "lora_path": f"/x/{step}", "flush_cache": step == 2}
        answer = (await call(engine, "POST", path, json=body)).json()
        assert answer == {
            "success": True,
            "error_message": "",
            "loaded_adapters": {"p": f"/x/{step}"},
        }
    assert [name for name, _ in engine.control.calls] == [
        "load_adapter_folder",
        "load_adapter_folder",
        "reset_prefix_cache",
    ]
    assert all(options["replaces"] for _, options in engine.control.calls[:2])
    answer = (await call(engine, "POST", "/unload_lora_adapter", json={"lora_name": "p"})).json()
    assert answer["loaded_adapters"] == {}
    response = await call(engine, "POST", "/unload_lora_adapter", json={"lora_name": "p"})
    assert response.status_code == 404
    assert response.json()["success"] is False
    assert "not loaded" in response.json()["error_message"]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_sglang_sends_the_tensors_of_an_adapter() -> None:
    engine = ScriptedEngine()
    path = "/load_lora_adapter_from_tensors"
    halves = [encode_safetensors({name: tensor}) for name, tensor in tensors().items()]
    body: dict[str, Any] = {
        "lora_name": "p",
        "config_dict": CONFIG,
        "serialized_named_tensors": [b64(half) for half in halves],
        "load_format": "safetensors",
        "pinned": True,
        "added_tokens_config": None,
        "rid": "x",
        "new_field": 1,
    }
    response = await call(engine, "POST", path, json=body)
    assert response.headers["x-ignored-fields"] == "new_field"
    assert response.json()["success"] is True
    assert set(response.json()["loaded_adapters"]) == {"p"}
    upload: AdapterUpload = engine.control.calls[0][1]["upload"]
    assert (upload.name, upload.replaces, upload.is_pinned) == ("p", True, True)
    uploaded = await call(engine, "POST", "/v1/update_adapter_weights", **as_json())
    assert uploaded.json()["digest"] == upload.weights.digest
    engine.control.calls.clear()
    for change in (
        {"load_format": None},
        {"load_format": "flattened_bucket"},
        {"serialized_named_tensors": []},
        {"serialized_named_tensors": [7]},
        {"serialized_named_tensors": [b64(b"\x80\x04cposix\nsystem\n")]},
        {"serialized_named_tensors": [b64(halves[0])]},
        {"serialized_named_tensors": [b64(DATA), b64(DATA)]},
        {"config_dict": None},
        {"config_dict": "{}"},
        {"lora_name": ""},
        {"pinned": "yes"},
        {"added_tokens_config": {"<new>": 1}},
        {"expected_checksums": {"x": "y"}},
    ):
        response = await call(engine, "POST", path, json={**body, **change})
        assert response.status_code == 400, change
        assert response.json()["success"] is False
        assert response.json()["error"]["param"] == next(iter(change))
    response = await call(engine, "POST", path, json={**body, "load_format": "flattened_bucket"})
    assert "'safetensors'" in response.json()["error_message"]
    assert not engine.control.calls


@pytest.mark.parametrize(
    ("path", "answer", "calls"),
    [
        ("/pause", "paused", [("pause", PauseMode.ABORT, False)]),
        ("/pause?mode=keep&clear_cache=false", "paused", [("pause", PauseMode.KEEP, False)]),
        ("/pause?mode=wait&clear_cache=true", "paused", [("pause", PauseMode.WAIT, True)]),
    ],
)
async def test_vllm_pauses(path: str, answer: str, calls: list[Any]) -> None:
    engine = ScriptedEngine()
    response = await call(engine, "POST", path)
    assert response.json()["status"] == answer
    pauses = [
        (name, options["mode"], options["clear_cache"]) for name, options in engine.control.calls
    ]
    assert pauses == calls
    assert (await call(engine, "GET", "/is_paused")).json() == {"is_paused": True}
    for _ in range(2):
        assert (await call(engine, "POST", "/resume")).json() == {"status": "resumed"}
    assert (await call(engine, "GET", "/is_paused")).json() == {"is_paused": False}


@pytest.mark.parametrize(
    ("body", "mode", "is_reset"),
    [
        ({}, PauseMode.ABORT, False),
        ({"json": {}}, PauseMode.ABORT, False),
        ({"json": {"mode": "in_place"}}, PauseMode.KEEP, False),
        ({"json": {"mode": "retract"}}, PauseMode.KEEP, True),
    ],
)
async def test_sglang_pauses(body: dict[str, Any], mode: PauseMode, is_reset: bool) -> None:
    engine = ScriptedEngine()
    answer = (await call(engine, "POST", "/pause_generation", **body)).json()
    assert (answer["status"], answer["num_paused_requests"]) == ("ok", 3)
    assert engine.control.calls[0][1]["mode"] is mode
    assert (len(engine.control.calls) == 2) is is_reset
    body = {"json": {"torch_empty_cache": True}}
    answer = (await call(engine, "POST", "/continue_generation", **body)).json()
    assert answer["status"] == "ok"
    assert not engine.control.is_paused


async def test_caches_are_reset() -> None:
    engine = ScriptedEngine()
    assert (await call(engine, "POST", "/reset_prefix_cache")).json() == {"success": True}
    bodies: list[dict[str, Any]] = [
        {"params": {"reset_running_requests": "true", "reset_external": "false"}},
        {"json": {"reset_running_requests": True}},
    ]
    for more in bodies:
        await call(engine, "POST", "/reset_prefix_cache", **more)
    resets = [options for _, options in engine.control.calls]
    assert resets == [
        {"reset_running": False, "reset_external": True},
        {"reset_running": True, "reset_external": False},
        {"reset_running": True, "reset_external": True},
    ]
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert (await call(engine, "POST", path)).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_flush_waits_for_requests(method: str) -> None:
    engine = ScriptedEngine()
    response = await call(engine, method, "/flush_cache?timeout=0.01")
    assert response.status_code == 400
    assert not engine.control.calls
    await engine.control.pause(PauseMode.KEEP)
    assert (await call(engine, method, "/flush_cache")).text == "Cache flushed.\n"


ADMIN = [
    ("POST", "/v1/update_adapter_weights"),
    ("GET", "/v1/adapters"),
    ("GET", "/adapters/p"),
    ("DELETE", "/v1/adapters/p"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/load_lora_adapter_from_tensors"),
    ("POST", "/unload_lora_adapter"),
    ("POST", "/update_weights_from_lora"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/reset_mm_cache"),
    ("POST", "/reset_encoder_cache"),
    ("GET", "/flush_cache"),
]


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_only_the_admin_key_opens_them(method: str, path: str) -> None:
    engine = ScriptedEngine()
    body = {"lora_name": "p", "lora_path": "/x"}
    for key in ("", "one-key"):
        response = await call(engine, method, path, config=BOTH, key=key, json=body)
        assert response.status_code == 401, key
    response = await call(engine, method, path, json=body, headers={"origin": "http://elsewhere"})
    assert response.status_code == 403
    assert not engine.control.calls
    response = await call(engine, method, path, config=BOTH, key="admin-key", json=body)
    assert response.status_code not in (401, 403)
