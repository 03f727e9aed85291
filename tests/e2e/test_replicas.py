"""Three servers that change together: what one is asked reaches all, or none."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.cli.main import main
from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.replicas.entries import Entry
from mlx_parallm.replicas.frames import pack_head
from tests import adapter_files
from tests.replica_servers import HEADERS, KEY, RAW, SMALL, ReplicaServers, replicas

NAME = "model.layers.0.input_layernorm.weight"


def changed(factor: float) -> bytes:
    """Return a safetensors file with one changed weight of the embedded model."""
    loaded = mx.load(str(DEMO_FOLDER / "model.safetensors"))
    assert isinstance(loaded, dict)
    return encode_safetensors({NAME: factor * np.array(loaded[NAME].astype(mx.float32))})


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replicas")
    shutil.copytree(DEMO_FOLDER, root / "first")
    adapter_files.save(root / "adapter", 7)
    return root


@pytest.fixture(scope="module")
def fleet(roots: Path) -> Iterator[ReplicaServers]:
    with replicas(3, *SMALL, "--allowed-adapter-roots", str(roots)) as servers:
        yield servers


def load(fleet: ReplicaServers, number: int, name: str, seed: int) -> dict[str, Any]:
    query = {"name": name, "config": json.dumps(adapter_files.CONFIG)}
    content = adapter_files.upload(seed)
    path = "/v1/update_adapter_weights"
    return fleet.post(number, path, content=content, params=query, headers=RAW)


def check_alike(fleet: ReplicaServers, model: str | None = None) -> tuple[list[int], set[str]]:
    """Return what all servers generate, which must be the same."""
    answers = [fleet.tokens(number, model) for number in range(3)]
    assert answers[1:] == answers[:-1]
    return answers[0]


def test_adapters_reach_all(fleet: ReplicaServers, roots: Path) -> None:
    plain, _ = check_alike(fleet)
    card = load(fleet, 1, "a", 1)
    assert card["peers"] == dict.fromkeys(fleet.urls, card["version"])
    first, versions = check_alike(fleet, "a")
    assert first != plain
    assert card["version"] in str(versions)
    body = {"lora_name": "b", "lora_path": str(roots / "adapter")}
    answer = fleet.ask(2, "POST", "/v1/load_lora_adapter", json=body)
    assert answer.text.startswith("Success")
    assert set(json.loads(answer.headers["x-peers"])) == set(fleet.urls)
    assert check_alike(fleet, "b")[0] != first
    cards = [fleet.ask(number, "GET", "/v1/adapters").json()["data"] for number in range(3)]
    digests = [{card["name"]: card["digest"] for card in each} for each in cards]
    assert digests[0] == digests[1] == digests[2]
    assert fleet.ask(0, "DELETE", "/v1/adapters/a").json()["deleted"]
    for number in range(3):
        assert fleet.ask(number, "GET", "/v1/adapters/a").status_code == 404


def test_weights_reach_all(fleet: ReplicaServers, roots: Path) -> None:
    plain, _ = check_alike(fleet)
    answer = fleet.post(0, "/update_weights", content=changed(-1), headers=RAW)
    assert answer["peers"] == dict.fromkeys(fleet.urls, answer["weight_version"])
    second, versions = check_alike(fleet)
    assert second != plain
    assert versions == {answer["weight_version"]}
    body = {"weight_dir": str(roots / "first"), "version": "mine"}
    fleet.post(1, "/update_weights", json=body)
    assert check_alike(fleet) == (plain, {"mine"})
    fleet.post(2, "/update_weight_version", json={"new_version": "named"})
    assert check_alike(fleet) == (plain, {"named"})


@pytest.mark.slow
def test_refusals_change_nothing_anywhere(fleet: ReplicaServers) -> None:
    before = check_alike(fleet)
    query = {"expected_version": "another"}
    answer = fleet.ask(2, "POST", "/update_weights", content=changed(3), params=query, headers=RAW)
    assert answer.status_code == 412, answer.text
    assert fleet.ask(1, "DELETE", "/v1/adapters/none").status_code == 404
    answer = fleet.ask(1, "POST", "/update_weights", content=changed(float("nan")), headers=RAW)
    assert answer.status_code == 400, answer.text
    assert check_alike(fleet) == before


@pytest.mark.slow
def test_pauses_reach_all(fleet: ReplicaServers) -> None:
    assert "peers" in fleet.post(0, "/pause")
    for number in range(3):
        assert fleet.ask(number, "GET", "/is_paused").json()["is_paused"]
    fleet.post(1, "/resume")
    for number in range(3):
        assert not fleet.ask(number, "GET", "/is_paused").json()["is_paused"]
    assert "peers" in fleet.post(2, "/reset_prefix_cache")


@pytest.mark.slow
def test_peers_are_heard_with_the_key_alone(fleet: ReplicaServers) -> None:
    for path in ("state", "journal"):
        url = f"/v1/peers/{path}"
        wrong = {"authorization": "Bearer other"}
        assert fleet.ask(0, "GET", url, headers=wrong).status_code == 401
        assert fleet.ask(0, "GET", url, headers={"authorization": ""}).status_code == 401
        other = {"x-mlx-parallm-release": "0.0.1"}
        answer = fleet.ask(0, "GET", url, headers={**HEADERS, **other})
        assert answer.status_code == 409
        assert "0.0.1" in answer.text
    head = {"kind": "update_weights", "model": "m", "folder": None, "names": []}
    state = fleet.ask(0, "GET", "/v1/peers/state").json()
    place = state["seen"] + 1, state["digest"]
    entry = pack_head(Entry(*place, head, "0" * 64, fleet.urls[0]))
    whole = entry + b"tensors of another digest"
    for body in (b"", b"garbage", b"\xff\xff\xff\xff{}", b"\x02\x00\x00\x00{}", entry[:-9], whole):
        answer = fleet.ask(0, "POST", "/v1/peers/stage", content=body, headers=RAW)
        assert answer.status_code == 400, answer.text
    for path in ("commit", "drop"):
        answer = fleet.ask(0, "POST", f"/v1/peers/{path}?digest=unknown")
        assert answer.status_code == (409 if path == "commit" else 200)
    assert fleet.ask(0, "GET", "/v1/contents/unknown").status_code == 404


@pytest.mark.slow
def test_a_server_that_comes_late_gets_all(fleet: ReplicaServers) -> None:
    for name, seed in (("x", 11), ("y", 12), ("z", 13)):
        load(fleet, 0, name, seed)
    fleet.post(1, "/update_weights", content=changed(-2), headers=RAW)
    fleet.kill(2)
    answer = fleet.ask(0, "POST", "/resume")
    assert answer.status_code == 503
    assert fleet.urls[2] in answer.text
    applied = fleet.post(0, "/v1/peers/apply?force=true")
    assert sum(row["ready"] for row in applied["data"]) == 2
    forced = fleet.post(0, "/update_weights", content=changed(-3), headers=RAW)
    assert set(forced["peers"]) == set(fleet.urls[:2])
    assert "-" in forced["weight_version"]
    fleet.post(1, "/pause?mode=keep")
    fleet.start(2)
    assert fleet.ask(2, "GET", "/is_paused").json()["is_paused"]
    fleet.post(2, "/resume")
    for name in ("x", "y", "z"):
        check_alike(fleet, name)
    assert check_alike(fleet)[1] == {forced["weight_version"]}


@pytest.mark.slow
def test_commands_show_and_mend_a_fleet(
    fleet: ReplicaServers, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", fleet.urls[0], "--api-key", KEY]
    assert main(["fleet", "status", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["SERVER", *sorted(fleet.urls)]
    assert main(["fleet", "drain", fleet.urls[1], "--api-key", KEY]) == 0
    assert main(["fleet", "status", *flags]) == 1
    assert "is being drained" in capsys.readouterr().out
    assert main(["fleet", "drain", fleet.urls[1], "--undo", "--api-key", KEY]) == 0
    assert main(["fleet", "apply", *flags]) == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_many_changes_leave_nothing_open(fleet: ReplicaServers) -> None:
    def change(number: int) -> None:
        load(fleet, number % 3, "again", number)
        fleet.ask(number % 3, "POST", "/update_weights", content=b"no tensors", headers=RAW)

    for number in range(3):
        change(number)
    before = [num_descriptors(fleet, number) for number in range(3)]
    for number in range(3, 21):
        change(number)
    after = [num_descriptors(fleet, number) for number in range(3)]
    # Connections come and go; each change would leave one at least.
    assert max(late - early for early, late in zip(before, after, strict=True)) < 12
    fleet.check_alike()


def num_descriptors(fleet: ReplicaServers, number: int) -> int:
    process = fleet.processes[number]
    assert process is not None
    return len(os.listdir(f"/proc/{process.process.pid}/fd"))


@pytest.mark.slow
def test_models_reach_all(fleet: ReplicaServers) -> None:
    card = fleet.post(1, "/v1/models/load", json={"model": "demo:mlm", "name": "second"})
    assert set(card["peers"]) == set(fleet.urls)
    for number in range(3):
        assert fleet.ask(number, "GET", "/v1/models/second").status_code == 200
    fleet.post(0, "/v1/models/unload", json={"model": "second"})
    for number in range(3):
        assert fleet.ask(number, "GET", "/v1/models/second").status_code == 404


@pytest.mark.slow
def test_a_server_that_is_drained_answers_and_is_not_ready(fleet: ReplicaServers) -> None:
    fleet.post(1, "/v1/peers/drain")
    answer = fleet.ask(1, "GET", "/ready")
    assert answer.status_code == 503
    assert "drained" in answer.text
    fleet.tokens(1)
    fleet.post(1, "/v1/peers/drain?draining=false")
    assert fleet.ask(1, "GET", "/ready").status_code == 200
