"""Routes about the server and the requests in it, over a scripted engine."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.datastructures import Headers

from mlx_parallm.api.control.server.aborts import is_named
from mlx_parallm.api.control.server.routes import SECRETS
from mlx_parallm.api.http.auth import client_of
from mlx_parallm.config import CacheConfig, EngineConfig, KVPeersConfig, SchedulerConfig
from mlx_parallm.engine.models import ModelMemory
from mlx_parallm.engine.status import ModelStatus, Readiness
from mlx_parallm.nets.model import NetModel
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.request import GenerateRequest
from tests.api_app import make_app
from tests.fake_engine import FakeEngine, status_of
from tests.nets import recurrent

OPEN = ServerConfig()
KEYS = ServerConfig(api_keys=("one-key", "two-key"))
BOTH = ServerConfig(api_keys=("one-key", "two-key"), admin_api_keys=("admin-key",))
ONLY_ADMIN = ServerConfig(admin_api_keys=("admin-key",))
# PLACES: what only an admin sees, of ``test_only_an_admin_learns_where_files_are``.
NAMES = ("place", "kv", "peer", "me", "engine", "key-file", "kv-peer", "gpu")
PLACES = {f"secret-{name}" for name in NAMES}
ERROR_KEYS = {"message", "type", "param", "code"}


async def call(
    engine: FakeEngine, config: ServerConfig, method: str, path: str, key: str = "", **more: Any
) -> httpx2.Response:
    transport = httpx2.ASGITransport(make_app(engine, config))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    headers |= more.pop("headers", {})
    async with httpx2.AsyncClient(transport=transport, base_url="http://here:8000") as client:
        return await client.request(method, path, headers=headers, **more)


def opened(config: ServerConfig, request_id: str, key: str, group: str | None = None) -> Any:
    client = client_of(Headers({"x-api-key": key}), config)
    return GenerateRequest(
        request_id=request_id, model="m", prompt_ids=(1,), client=client, group=group
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/nothing", 404, None),
        ("PUT", "/v1/models", 405, "GET, HEAD"),
        ("GET", "/v1/moderations", 405, "POST"),
        ("GET", "/abort_requests", 405, "POST"),
        ("DELETE", "/ping", 405, "GET, HEAD, POST"),
    ],
)
async def test_what_is_not_served_is_named(
    method: str, path: str, status: int, allow: str | None
) -> None:
    response = await call(FakeEngine(), OPEN, method, path)
    assert response.status_code == status
    assert response.headers.get("allow") == allow
    error = response.json()["error"]
    assert set(error) == ERROR_KEYS
    assert method in error["message"]
    assert path in error["message"]


@pytest.mark.parametrize("path", ["/v1/moderations", "/moderations"])
async def test_moderations_are_refused_for_good(path: str) -> None:
    response = await call(FakeEngine(), OPEN, "POST", path, json={"input": "x"})
    assert response.status_code == 501
    assert response.headers["x-should-retry"] == "false"
    assert set(response.json()["error"]) == ERROR_KEYS


@pytest.mark.parametrize("path", ["/health", "/ping", "/health_generate"])
async def test_a_server_that_was_told_to_stop_is_not_healthy(path: str) -> None:
    engine = FakeEngine()
    assert (await call(engine, OPEN, "GET", path)).status_code == 200
    engine.is_shutting_down = True
    answer = await call(engine, OPEN, "GET", path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health_without_a_key(method: str) -> None:
    engine = FakeEngine()
    assert (await call(engine, KEYS, method, "/ping")).status_code == 200
    engine.is_dead = True
    assert (await call(engine, KEYS, method, "/ping")).status_code == 503


async def test_ready_counts_the_engines_that_serve_without_a_key() -> None:
    engine = FakeEngine()
    engine.states = [Readiness.STARTING, Readiness.READY, Readiness.CATCHING_UP]
    answer = await call(engine, KEYS, "GET", "/ready")
    assert (answer.status_code, answer.json()) == (
        200,
        {"ready": 1, "engines": 3, "steps_s": [0.0] * 3},
    )
    engine.states = [Readiness.STARTING, Readiness.CATCHING_UP]
    answer = await call(engine, KEYS, "GET", "/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert "0 of 2" in answer.json()["error"]["message"]
    engine.states = [Readiness.READY]
    engine.is_shutting_down = True
    answer = await call(engine, KEYS, "GET", "/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


async def test_server_info_sums_the_limits_of_all_engines() -> None:
    engine = FakeEngine()
    engine.states = [Readiness.READY, Readiness.STARTING, Readiness.READY]
    engine.engine_config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=7))
    config = replace(BOTH, api_server_count=4)
    info = (await call(engine, config, "GET", "/server_info", "one-key")).json()
    assert (info["dp_size"], info["api_server_count"]) == (3, 4)
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 3
    assert (info["max_running_requests"], info["max_total_num_tokens"]) == (21, 128)
    limits = [
        (each["dp_rank"], each["state"], each["max_total_num_tokens"]) for each in info["engines"]
    ]
    assert limits == [(0, "ready", 64), (1, "starting", 0), (2, "ready", 64)]


async def test_load_counts_requests_and_sequences() -> None:
    response = await call(FakeEngine(), KEYS, "GET", "/load")
    assert response.json() == {"server_load": 3, "num_running": 2, "num_waiting": 1}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
@pytest.mark.parametrize("form", ["json", "text"])
async def test_server_info_tells_settings_and_no_keys(path: str, form: str) -> None:
    engine = FakeEngine()
    engine.engine_config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=7))
    response = await call(engine, BOTH, "GET", f"{path}?config_format={form}", "one-key")
    info = response.json()
    assert "-key" not in response.text
    assert info["max_running_requests"] == 7
    assert info["models"][0]["names"] == ["org/fake", "alias"]
    if form == "json":
        assert info["vllm_config"]["scheduler"]["max_num_seqs"] == 7
    else:
        assert "scheduler.max_num_seqs=7" in info["vllm_config"].splitlines()


@pytest.mark.parametrize(
    ("config", "key", "headers", "tells"),
    [
        (OPEN, "", {}, True),
        (OPEN, "", {"origin": "https://page.example"}, False),
        (KEYS, "one-key", {}, True),
        (BOTH, "one-key", {}, False),
        (BOTH, "admin-key", {}, True),
    ],
)
@pytest.mark.parametrize("form", ["json", "text"])
async def test_only_an_admin_learns_where_files_are(
    config: ServerConfig, key: str, headers: dict[str, str], tells: bool, form: str
) -> None:
    config = replace(
        config,
        data_dir="/srv/secret-place",
        peers=("http://secret-peer:1",),
        peer_url="http://secret-me:1",
        engines=("secret-engine:1",),
        peer_key_file=Path("/srv/secret-key-file"),
    )
    engine = FakeEngine()
    engine.engine_config = EngineConfig(
        cache=CacheConfig(kv_disk=Path("/srv/secret-kv")),
        kv_peers=KVPeersConfig(
            urls=("http://secret-kv-peer:1",), prefill_url="http://secret-gpu:1"
        ),
    )
    path = f"/server_info?config_format={form}"
    response = await call(engine, config, "GET", path, key, headers=headers)
    assert response.status_code == 200
    assert set(re.findall("secret-[a-z-]+", response.text)) == (PLACES if tells else set())
    assert "kv_disk_bytes" in response.text


def test_no_key_is_among_the_settings() -> None:
    engine = EngineConfig()
    parts = [ServerConfig(), engine, *(getattr(engine, each.name) for each in fields(engine))]
    names = {
        each.name for part in parts if is_dataclass(part) for each in fields(part) if not each.repr
    }
    assert {"peer_key", "key"} <= names
    assert names <= SECRETS


async def test_server_info_needs_a_key_and_a_known_form() -> None:
    assert (await call(FakeEngine(), KEYS, "GET", "/server_info")).status_code == 401
    response = await call(FakeEngine(), OPEN, "GET", "/server_info?config_format=xml")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "config_format")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_is_of_the_first_model(path: str) -> None:
    info = (await call(FakeEngine(), OPEN, "GET", path)).json()
    assert (info["model_path"], info["context_length"]) == ("/models/fake", 256)


class WithoutGenerator(FakeEngine):
    """Serves one net, which may not have been loaded yet."""

    def __init__(self, *, is_loaded: bool) -> None:
        super().__init__()
        net = NetModel(
            names=("net",),
            root="/nets/net",
            created=1,
            signature=recurrent(),
            weight_bytes=7,
            max_rows=8,
        )
        status = status_of(net)
        self._status = status if is_loaded else replace(status, model=None)

    def statuses(self) -> list[ModelStatus]:
        return [self._status]

    async def memory(self) -> dict[str, ModelMemory]:
        return {"net": ModelMemory(weights=7)}


#: Fields and groups that a server without generators has nothing for.
OF_GENERATORS = {"context_length", "dtype", "tokenizer_path"}
OF_POOLS = {"block_size", "num_gpu_blocks"}


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_a_server_of_nets_tells_nothing_of_generators(is_loaded: bool) -> None:
    engine = WithoutGenerator(is_loaded=is_loaded)
    response = await call(engine, OPEN, "GET", "/server_info")
    info = response.json()
    assert response.status_code == 200
    assert not OF_GENERATORS & info.keys()
    assert not OF_POOLS & info["vllm_config"]["cache_config"].keys()
    known = {"model": "/nets/net", "served_model_name": ["net"]} if is_loaded else {}
    assert info["vllm_config"]["model_config"] == known | {"logprobs_mode": "raw_logprobs"}
    assert [each["names"] for each in info["models"]] == [["net"]]
    described = (await call(engine, OPEN, "GET", "/model_info")).json()
    assert described.items() <= info.items()
    assert described["is_generation"] is False
    assert described.get("model_path") == ("/nets/net" if is_loaded else None)
    assert ("weight_version" in described) is is_loaded


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_a_net_says_what_it_reads_and_returns(is_loaded: bool) -> None:
    engine = WithoutGenerator(is_loaded=is_loaded)
    (card,) = (await call(engine, OPEN, "GET", "/v1/models")).json()["data"]
    assert (await call(engine, OPEN, "GET", "/v1/models/net")).json() == card
    if not is_loaded:
        assert "signature" not in card
        return
    signature = card["signature"]
    assert [each["name"] for each in signature["inputs"]] == ["obs"]
    assert signature["outputs"][0]["shape"] == [-1, -1, 2]
    assert [each["name"] for each in signature["states"]] == ["lstm.h", "lstm.c"]
    assert signature["policy"]["parameters"] == "logits"
    assert signature["tile_rows"] is None
    (facts,) = (await call(engine, OPEN, "GET", "/server_info")).json()["models"]
    assert facts["signature"] == signature


@pytest.mark.parametrize(
    ("config", "key", "aborted"),
    [
        (OPEN, "", ["chatcmpl-a", "chatcmpl-b"]),
        (KEYS, "one-key", ["chatcmpl-a"]),
        (KEYS, "two-key", ["chatcmpl-b"]),
        (BOTH, "one-key", ["chatcmpl-a"]),
        (BOTH, "admin-key", ["chatcmpl-a", "chatcmpl-b"]),
        (ONLY_ADMIN, "admin-key", ["chatcmpl-a", "chatcmpl-b"]),
    ],
)
async def test_only_an_admin_reaches_requests_of_others(
    config: ServerConfig, key: str, aborted: list[str]
) -> None:
    engine = FakeEngine()
    engine.open = [
        opened(config, f"chatcmpl-{n}", k) for n, k in zip("ab", KEYS.api_keys, strict=True)
    ]
    wanted = {"request_ids": ["a", "chatcmpl-b", "c"]}
    response = await call(engine, config, "POST", "/abort_requests", key, json=wanted)
    assert response.json() == {"aborted": aborted}
    assert engine.cancelled == aborted
    response = await call(engine, config, "POST", "/abort_request", key, json={"abort_all": True})
    assert response.json() == {"aborted": aborted}


async def test_without_api_keys_an_admin_key_that_is_set_is_needed() -> None:
    response = await call(FakeEngine(), ONLY_ADMIN, "POST", "/abort_request", json={"rid": "a"})
    assert response.status_code == 401


async def test_pages_of_other_origins_abort_nothing() -> None:
    headers = {"origin": "http://elsewhere"}
    body = {"abort_all": True}
    engine = FakeEngine()
    response = await call(engine, OPEN, "POST", "/abort_request", json=body, headers=headers)
    assert response.status_code == 403


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/abort_requests", {}, "request_ids"),
        ("/abort_requests", {"request_ids": []}, "request_ids"),
        ("/abort_requests", {"request_ids": "a"}, "request_ids"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": ""}, "rid"),
        ("/abort_request", {"rid": 7}, "rid"),
        ("/abort_request", {"abort_all": "yes"}, "abort_all"),
    ],
)
async def test_a_bad_abort_names_its_field(path: str, body: Any, param: str) -> None:
    response = await call(FakeEngine(), OPEN, "POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_every_prompt_of_an_answer_is_aborted_and_named_once() -> None:
    engine = FakeEngine()
    engine.open = [opened(OPEN, f"cmpl-job-{i}", "", "cmpl-job") for i in range(3)]
    engine.open.append(opened(OPEN, "cmpl-job-1-x", ""))
    response = await call(engine, OPEN, "POST", "/abort_request", json={"rid": "job"})
    assert response.json() == {"aborted": ["cmpl-job"]}
    assert engine.cancelled == ["cmpl-job-0", "cmpl-job-1", "cmpl-job-2"]


def test_an_id_that_only_begins_the_same_is_another() -> None:
    request = opened(OPEN, "chatcmpl-job-1", "")
    assert is_named(request, frozenset({"job-1"}))
    assert not is_named(request, frozenset({"job", "1", "", "chatcmpl"}))
